"""A run in a store and its folder on a machine: what is committed goes up, what is missing comes down.

    RUN/driver.json                  who trains it: the id of the driver that began last
    RUN/checkpoints/step_000000009/  as in a run folder; it counts from the moment on in which its meta.json is there
    RUN/steps.parquet, ledger.parquet    as in a run folder; parts of steps behind the newest checkpoint do not count
    RUN/metrics.jsonl/000-123.jsonl  the bytes from 0 to 123 of the live record
    RUN/...                          all other files of the run folder, whole

A run folder with a file `.home` is the copy of such a run. Who reads or writes runs knows of the copy alone.
"""

import json
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from tokendrop.atomic import atomic_write
from tokendrop.data.shards.store import PATIENCE_S
from tokendrop.errors import StorageError, UserError
from tokendrop.track.evaluations import EVALUATIONS, SENT
from tokendrop.track.journal import LEDGER, METRICS, STEPS
from tokendrop.track.parts import span_of
from tokendrop.track.run_store import RunStore
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, committed, committed_step, step_name, step_of

HOME, DRIVER = ".home", "driver.json"
_DATASETS = (STEPS, LEDGER)
_OF_MACHINE = ("control", "ray")  # folders that are of no use on another machine, or in another attempt
_MARKER = re.compile(rf"{CHECKPOINTS}/step_(\d{{9,}})/{re.escape(META)}")
_PATIENCE_S = PATIENCE_S


class RunHome:
    """Where a run of a store lies on this machine, and in the store."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the run folder, with its `.home`.
        """
        told = json.loads((folder / HOME).read_bytes())
        self.folder, self.address, self.driver = folder, str(told["address"]), str(told["driver"])
        self.store = RunStore(self.address, patience_s=_PATIENCE_S)
        self._sent: dict[str, tuple[int, int]] = {}
        self._parts: set[str] | None = None

    # what a driver does

    def begin(self) -> None:
        """From now on this driver trains the run: whoever did so before ends at its next checkpoint.

        Raises:
            UserError: the store does not take it.
        """
        self.driver = uuid4().hex
        write_home(self.folder, self.address, self.driver)
        told = {"id": self.driver, "host": platform.node(), "time": time.time()}
        self.store.put(DRIVER, json.dumps(told).encode())
        newest = max(self.steps(), default=0)
        for checkpoint in committed(self.folder / CHECKPOINTS):  # of a fork, which begins with one
            if step_of(checkpoint) > newest:
                for file in checkpoint.iterdir():
                    if file.name != META:
                        self.put(file)
                self.commit(checkpoint)
        self.put_record(committed_step(self.folder / CHECKPOINTS))

    def end(self) -> None:
        """Write what has come to the record since the last checkpoint; raises StorageError as `commit` does."""
        self._check_driver()
        self.put_record(committed_step(self.folder / CHECKPOINTS))

    def put_evaluations(self) -> None:
        """Write the evaluations that the store lacks."""
        there = self.store.files(EVALUATIONS)
        for name in small_files(self.folder):
            if name.startswith(f"{EVALUATIONS}/") and name not in there:
                self.store.put(name, self.folder / name)

    def committed_step(self) -> int:
        """Steps done by the newest checkpoint in the store, 0 without one; nothing is copied."""
        return max(self.steps(), default=0)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are committed in the store, rising."""
        return committed_in(self.store.files(CHECKPOINTS))

    # what its workers do

    def cut(self, step: int) -> None:
        """Remove what is behind `step`, from which the run goes on: damaged checkpoints, parts that are written anew.

        Called by rank 0 when all workers have read their checkpoint.
        """
        with self._telling():
            self._check_driver()
            files = self.store.files(CHECKPOINTS)
            for later in committed_in(files):
                if later > step:
                    self._remove_checkpoint(later, files)
            self._parts = set()
            for part in (name for dataset in _DATASETS for name in self.store.files(dataset)):
                if is_behind(part, step):
                    self.store.remove(part)
                else:
                    self._parts.add(part)

    def put(self, file: Path) -> None:
        """Write a file of a checkpoint, by whichever worker made it; raises StorageError where that can't be."""
        with self._telling():
            self.store.put(_in_checkpoint(file), file)

    def commit(self, checkpoint: Path) -> None:
        """By rank 0, when all files but the last are there: the record up to this step, and that it is committed.

        Args:
            checkpoint: its folder, which may still have the suffix `.partial`.
        Raises:
            StorageError: the store does not take it, or another driver trains the run by now.
        """
        step = step_of(checkpoint.with_suffix(""))
        with self._telling():
            self._check_driver()
            self.put_record(step)
            self.store.put(_in_checkpoint(checkpoint / META), checkpoint / META)

    def remove_old(self, keep: int) -> None:
        """By rank 0: remove all checkpoints there but the newest ones, and but those that the run folder still has."""
        with self._telling():
            files = self.store.files(CHECKPOINTS)
            for step in committed_in(files)[:-keep]:
                if not (self.folder / CHECKPOINTS / step_name(step)).exists():
                    self._remove_checkpoint(step, files)

    def put_record(self, step: int) -> None:
        """Write what the store lacks of the record: parts up to `step`, the live record, files that have changed."""
        if self._parts is None:
            self._parts = {name for dataset in _DATASETS for name in self.store.files(dataset)}
        for dataset in _DATASETS:
            for part in sorted((self.folder / dataset).glob("[!.]*.parquet")):
                name = f"{dataset}/{part.name}"
                if name not in self._parts and not is_behind(name, step):
                    self.store.put(name, part)
                    self._parts.add(name)
        self._put_metrics()
        for name, state in small_files(self.folder).items():
            if self._sent.get(name) != state:
                self.store.put(name, self.folder / name)
                self._sent[name] = state

    def _put_metrics(self) -> None:
        path, begin = self.folder / METRICS, end_of(chained(self.store.files(METRICS)))
        if not path.exists() or path.stat().st_size <= begin:
            return
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read()
        if whole := content[: content.rfind(b"\n") + 1]:
            self.store.put(f"{METRICS}/{begin:012}-{begin + len(whole):012}.jsonl", whole)

    def _remove_checkpoint(self, step: int, files: Iterable[str]) -> None:
        """What says that it is committed goes first."""
        folder = f"{CHECKPOINTS}/{step_name(step)}/"
        for file in sorted((one for one in files if one.startswith(folder)), key=lambda one: one != folder + META):
            self.store.remove(file)

    def _check_driver(self) -> None:
        told = json.loads(self.store.read(DRIVER))
        if told["id"] != self.driver:
            raise StorageError(
                f"{self.address}: a driver on {told['host']} trains this run by now, since"
                f" {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(told['time']))}; this one ends"
            )

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except UserError as error:
            go_on = f"'tokendrop train --resume {self.address}' goes on from there"
            raise StorageError(f"{error}; what is committed there stays, and {go_on}") from None


def home_of(folder: Path) -> RunHome | None:
    """The home of a run folder that is the copy of a run in a store; None for a run that lies in its folder alone."""
    return RunHome(folder) if (folder / HOME).exists() else None


def place_of(run: Path) -> str:
    """What a run is known by, for messages: the address of one that a store keeps, else its folder."""
    home = home_of(run)
    return home.address if home else str(run)


def write_home(folder: Path, address: str, driver: str = "") -> None:
    """Make a folder the copy of the run at an address."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / HOME, json.dumps({"address": address, "driver": driver}).encode())


def small_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Files of a run folder beside its checkpoints and its record: bytes and time of change, by name."""
    found: dict[str, tuple[int, int]] = {}
    for top in folder.iterdir():
        if not is_small(top.name):
            continue
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.is_file() and is_small(name := str(path.relative_to(folder))):
                state = path.stat()
                found[name] = (state.st_size, state.st_mtime_ns)
    return found


def is_small(name: str) -> bool:
    """Whether a file of this name, from the run folder on, is one of these; not one that is just being written."""
    first, *_ = parts = name.split("/")
    return first not in (CHECKPOINTS, *_DATASETS, METRICS, DRIVER, *_OF_MACHINE) and not any(
        ".partial" in part or (part.startswith(".") and part != SENT) for part in parts
    )


def is_behind(part: str, step: int) -> bool:
    """Whether a part tells of steps behind this one."""
    span = span_of(Path(part))
    return span is None or span[1] > step


def committed_in(files: Iterable[str]) -> list[int]:
    """Steps of committed checkpoints, rising, by the names of all files below `checkpoints`."""
    return sorted(int(found[1]) for file in files if (found := _MARKER.fullmatch(file)))


def chained(parts: Iterable[str]) -> list[str]:
    """Parts of the live record, each of which begins where the one before ends."""
    chain: list[str] = []
    for part in sorted(parts):
        begin, _, end = Path(part).stem.partition("-")
        if begin.isdecimal() and end.isdecimal() and int(begin) == end_of(chain):
            chain.append(part)
    return chain


def end_of(chain: list[str]) -> int:
    """Bytes of the live record that these parts hold."""
    return int(Path(chain[-1]).stem.partition("-")[2]) if chain else 0


def _in_checkpoint(file: Path) -> str:
    return f"{CHECKPOINTS}/{file.parent.name.removesuffix('.partial')}/{file.name}"
