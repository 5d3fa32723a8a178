"""A run in a store and its folder on a machine: what is committed goes up, what is missing comes down.

    RUN/driver.json                  who trains it: the id of the driver that began last
    RUN/checkpoints/step_000000009/DRIVER/   a checkpoint's files, in a folder of the driver whose workers wrote it: one
                                     that hangs can't replace what the next one writes. It counts from meta.json on
    RUN/steps.parquet, ledger.parquet    as in a run folder; parts of steps behind the newest checkpoint do not count
    RUN/metrics.jsonl/000-123.jsonl  the bytes from 0 to 123 of the live record
    RUN/...                          all other files of the run folder, whole

A run folder with a file `.home` is the copy of such a run. Who reads or writes runs knows of the copy alone.
"""

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from tokendrop.atomic import atomic_write
from tokendrop.data.shards.store import PATIENCE_S
from tokendrop.errors import StorageError, UserError
from tokendrop.track.evaluations import EVALUATIONS
from tokendrop.track.journal import METRICS
from tokendrop.track.run_files import (
    DATASETS,
    DRIVER,
    JOB,
    chained,
    committed_in,
    end_of,
    is_behind,
    small_files,
    steps_in,
)
from tokendrop.track.run_store import RunStore
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, aside, committed, committed_step, step_name, step_of

HOME = ".home"
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
        self._parts: dict[str, int] | None = None
        self.before_commit: Callable[[], int | None] = lambda: None
        """By rank 0, before the record is written: bytes of the live record to write, all where it is None."""

    # what a driver does

    def take_over(self) -> None:
        """From now on this driver trains the run: whoever did so before writes no more, and ends at a checkpoint.

        Raises:
            UserError: the store does not take it.
        """
        self.driver = uuid4().hex
        write_home(self.folder, self.address, self.driver)
        told = {"id": self.driver, "host": platform.node(), "time": time.time()}
        self.store.put(DRIVER, json.dumps(told).encode())

    def begin(self) -> None:
        """Write what the store lacks of a run that was just described; raises UserError where that can't be.

        Its job is last: a fork that the store knows has the checkpoint that it begins with.
        """
        files = small_files(self.folder)
        self._sent |= {JOB: files[JOB]} if JOB in files else {}
        newest = self.committed_step()
        for checkpoint in committed(self.folder / CHECKPOINTS):  # of a fork, which begins with one
            if step_of(checkpoint) > newest:
                for file in checkpoint.iterdir():
                    if file.name != META:
                        self.put(file)
                self.commit(checkpoint)
        self._sent.pop(JOB, None)
        self.put_record(committed_step(self.folder / CHECKPOINTS))

    def end(self) -> None:
        """Write what has come to the record since the last checkpoint; raises StorageError as `commit` does."""
        self._check_driver()
        self._parts = None  # workers have written since
        self.put_record(committed_step(self.folder / CHECKPOINTS))

    def put_evaluations(self) -> None:
        """Write the evaluations that the store lacks."""
        there = self.store.files(EVALUATIONS)
        for name in small_files(self.folder):
            if name.startswith(f"{EVALUATIONS}/") and name not in there:
                self.store.put(name, self.folder / name)

    def committed_step(self) -> int:
        """Steps done by the newest checkpoint in the store, 0 without one; nothing is copied.

        One that has proved damaged on this machine does not count.
        """
        saved, here = committed_in(self.store.files(CHECKPOINTS)), self.folder / CHECKPOINTS
        return max((step for step in saved if not aside(here / step_name(step)).exists()), default=0)

    # what its workers do

    def cut(self, step: int) -> None:
        """Remove what is behind `step`, from which the run goes on: damaged checkpoints, parts that are written anew.

        Called by rank 0 when all workers have read their checkpoint.

        Raises:
            StorageError: a checkpoint there is newer, neither damaged nor of this driver's own workers; nothing is
                removed. Or the store does not do it.
        """
        with self._telling():
            self._check_driver()
            files = self.store.files(CHECKPOINTS)
            for later, folder in committed_in(files).items():
                is_own = folder.endswith(f"/{self.driver}")  # of workers that were lost before they had it here
                if later > step and not is_own and not aside(self.folder / CHECKPOINTS / step_name(later)).exists():
                    raise StorageError(
                        f"{self.address}: has a checkpoint of step {later}, and this driver goes on from {step}; want"
                        f" 'tokendrop train --resume {self.address}', which goes on from there"
                    )
            self._remove(file for file, of in steps_in(files).items() if of > step)
            self._parts = {}
            for dataset in DATASETS:
                for part, (size, _) in self.store.files(dataset).items():
                    if is_behind(part, step):
                        self._remove([part])
                    else:
                        self._parts[part] = size

    def know_small_files(self) -> None:
        """Those that the folder has now came from the store, and are not written there again."""
        self._sent = small_files(self.folder)

    def put_small_files(self) -> None:
        """Write those that have changed."""
        for name, state in small_files(self.folder).items():
            if self._sent.get(name) != state:
                self._put(name, self.folder / name)
                self._sent[name] = state

    def put(self, file: Path) -> None:
        """Write a file of a checkpoint, by whichever worker made it; raises StorageError where that can't be."""
        with self._telling():
            self._put(self._in_checkpoint(file), file)

    def commit(self, checkpoint: Path) -> None:
        """By rank 0, when all files but the last are there: the record up to this step, and that it is committed.

        Args:
            checkpoint: its folder, which may still have the suffix `.partial`.
        Raises:
            StorageError: the store does not take it, or another driver now trains the run.
        """
        step = step_of(checkpoint.with_suffix(""))
        with self._telling():
            self._check_driver()
            self.put_record(step, live_bytes=self.before_commit())
            self._put(self._in_checkpoint(checkpoint / META), checkpoint / META)

    def remove_old(self, keep: int) -> None:
        """By rank 0: remove all checkpoints there but the newest ones, and but those that the run folder still has.

        So it does with what workers that were lost have left of others.
        """
        with self._telling():
            self._check_driver()
            files, here = self.store.files(CHECKPOINTS), self.folder / CHECKPOINTS
            saved = committed_in(files)
            newest = list(saved)[-keep:]
            stay = {folder for step, folder in saved.items() if step in newest or (here / step_name(step)).exists()}
            self._remove(
                file
                for file, of in steps_in(files).items()
                if of <= max(newest, default=0) and file.rpartition("/")[0] not in stay
            )

    def put_record(self, step: int, *, live_bytes: int | None = None) -> None:
        """Write what the store lacks of the record: parts up to `step`, the live record, files that have changed.

        Args:
            live_bytes: of the live record, from its begin on; all of it when left out.
        """
        if self._parts is None:
            self._parts = {name: size for dataset in DATASETS for name, (size, _) in self.store.files(dataset).items()}
        for dataset in DATASETS:
            for part in sorted((self.folder / dataset).glob("[!.]*.parquet")):
                name, size = f"{dataset}/{part.name}", part.stat().st_size
                if self._parts.get(name) != size and not is_behind(name, step):
                    self._put(name, part)
                    self._parts[name] = size
        self._put_metrics(live_bytes)
        self.put_small_files()

    def _put_metrics(self, live_bytes: int | None) -> None:
        path, begin = self.folder / METRICS, end_of(chained(self.store.files(METRICS)))
        end = path.stat().st_size if path.exists() and live_bytes is None else live_bytes or 0
        if end <= begin:
            return
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        if whole := content[: content.rfind(b"\n") + 1]:
            self._put(f"{METRICS}/{begin:012}-{begin + len(whole):012}.jsonl", whole)

    def _in_checkpoint(self, file: Path) -> str:
        return f"{CHECKPOINTS}/{file.parent.name.removesuffix('.partial')}/{self.driver}/{file.name}"

    def _put(self, name: str, content: Path | bytes) -> None:
        self.store.put(name, content, before=self._check_driver)

    def _remove(self, files: Iterable[str]) -> None:
        """What says that a checkpoint is committed goes first."""
        for file in sorted(files, key=lambda one: not one.endswith(f"/{META}")):
            self.store.remove(file, before=self._check_driver)

    def _check_driver(self) -> None:
        told = json.loads(self.store.read(DRIVER))
        if told["id"] != self.driver:
            raise StorageError(
                f"{self.address}: a driver on {told['host']} now trains this run, since"
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


def steps_done(run: Path) -> int:
    """Steps that a run goes on from: those of the newest checkpoint in its store, else in its folder.

    Raises:
        UserError: the store does not say.
        DamagedDataError: as `committed_step` does.
    """
    home = home_of(run)
    return home.committed_step() if home else committed_step(run / CHECKPOINTS)


def place_of(run: Path) -> str:
    """What a run is known by, for messages: the address of one that a store keeps, else its folder."""
    home = home_of(run)
    return home.address if home else str(run)


def write_home(folder: Path, address: str, driver: str = "") -> None:
    """Make a folder the copy of the run at an address."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / HOME, json.dumps({"address": address, "driver": driver}).encode())
