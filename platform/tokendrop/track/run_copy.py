"""Runs of a store, copied to their folders on this machine: for their drivers, their workers and for readers."""

import json
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from uuid import uuid4

from tokendrop.atomic import atomic_write, exclusive_lock, is_locked
from tokendrop.data.corpus.sources import public_name
from tokendrop.data.shards.store import MissingError
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.track.journal import METRICS
from tokendrop.track.run_files import DATASETS, JOB, chained, committed_in, is_behind, is_small
from tokendrop.track.run_home import HOME, RunHome, write_home
from tokendrop.track.run_store import FIRST_PATIENCE_S, RunStore, Told, address_below, runs_place, split_address
from tokendrop.train.checkpoint_index import (
    CHECKPOINTS,
    META,
    aside,
    check_whole,
    committed,
    read_meta,
    remove_old,
    step_name,
    step_of,
)

_ARRIVING = ".arriving"
_SEEN = ".seen"
_COPYING = ".copying"
"""The lock of who makes a folder what the store has; that of a driver is another, held as long as it trains."""
_APART = ".not-in-store"
_MOST_DAMAGED = 3  # copies of a checkpoint in a row
_RUNS_AT_ONCE = 8


def copied_run(place: str, *, checkpoint: bool = True) -> Path:
    """The folder on this machine of a run at an address, or of all runs below it where no checkpoint is needed.

    Args:
        checkpoint: whether the newest checkpoint is copied too.
    Raises:
        UserError: there is no such run, or the store does not give it.
    """
    runs_folder, name = split_address(place)
    store = RunStore(place, patience_s=FIRST_PATIENCE_S)
    if store.has(JOB):
        return bring(runs_folder, name, checkpoint=checkpoint)
    names = [name for name in store.folders() if store.has(f"{name}/{JOB}")]
    if not names or checkpoint:
        raise UserError(f"{public_name(place)}: no run there (no {JOB}); want the address of one that training made")
    with ThreadPoolExecutor(_RUNS_AT_ONCE) as threads:
        list(threads.map(partial(bring, place, checkpoint=False), names))
    return runs_place(place)


def is_there(runs_folder: str, name: str) -> bool:
    """Whether a store has a run, or the begin of one."""
    return RunStore(address_below(runs_folder, name), patience_s=FIRST_PATIENCE_S).has(JOB)


def bring(runs_folder: str, name: str, *, checkpoint: bool = True) -> Path:
    """Make the folder on this machine of a run in a store what the store has, for readers and for who goes on.

    While a driver on this machine trains the run, its folder stays as it is: it is newer.

    Args:
        runs_folder: the address of the folder that the run is in.
        checkpoint: whether the newest checkpoint is copied too.
    """
    folder, address = runs_place(runs_folder) / name, address_below(runs_folder, name)
    with exclusive_lock(folder, name=_COPYING):  # asked first: a driver that begins holds it until its copy is whole
        if is_locked(folder):
            return folder
        if not (folder / HOME).exists():
            write_home(folder, address)
        _Copy(folder, RunStore(address)).update(checkpoint=checkpoint)
    return folder


def refresh(home: RunHome) -> None:
    """Make the folder of a driver, which has its lock, what the store has; from now on this driver trains the run.

    A run that the store does not have yet stays as it is.

    Raises:
        UserError: the store does not take that, or does not give the run.
    """
    with exclusive_lock(home.folder, name=_COPYING):
        home.take_over()  # first, so that nothing newer is committed while this is copied
        if home.store.has(JOB):
            _Copy(home.folder, home.store).update(checkpoint=True)


def bring_for_workers(folder: Path, address: str, driver: str) -> None:
    """Make a folder of a machine that does not see the driver's copy what its workers go on from: no record.

    What workers before them have left there goes, but for checkpoints: none of it may reach the store any more.

    Raises:
        UserError: the store does not give it.
    """
    with exclusive_lock(folder, name=_COPYING):
        for left in folder.iterdir():
            if left.is_dir() and left.name != CHECKPOINTS:
                shutil.rmtree(left)
            elif left.is_file() and left.name != _COPYING:
                left.unlink()
        write_home(folder, address, driver)
        _Copy(folder, RunStore(address)).update(checkpoint=True, record=False)


def catch_up(home: RunHome) -> None:
    """Bring into the folder of a driver what its workers have committed from other copies; what is newer here stays."""
    files = home.store.files()
    saved = [home.folder / CHECKPOINTS / step_name(step) for step in committed_in(files)]
    parts = (home.folder / name for name in files if name.partition("/")[0] in DATASETS)
    if all(newest.exists() for newest in saved[-1:]) and all(part.exists() for part in parts):
        return
    with exclusive_lock(home.folder, name=_COPYING):
        _Copy(home.folder, home.store).update(checkpoint=True, ahead=True)


def set_apart(folder: Path) -> None:
    """Move the copy of a run that the store does not have out of the way: it may be all that is left of the run."""
    if any(folder.glob("[!.]*")):
        to = folder.parent / _APART / f"{folder.name}-{uuid4().hex[:8]}"
        to.parent.mkdir(exist_ok=True)
        folder.rename(to)
        print(f"note     {folder.name}: the store has no such run; the copy that was here is now {to}", file=sys.stderr)


class _Copy:
    """A run's folder while it is made what the store has."""

    def __init__(self, folder: Path, store: RunStore) -> None:
        self.folder, self.store = folder, store
        path = folder / _SEEN
        self.seen: dict[str, list[int]] = json.loads(path.read_bytes()) if path.exists() else {}

    def update(self, *, checkpoint: bool, record: bool = True, ahead: bool = False) -> None:
        """Bring what is missing.

        Args:
            ahead: the live record and the small files that are here are newer than the store's, and stay.
        """
        while True:
            files = self.store.files()
            try:
                step = self._checkpoint(files) if checkpoint else max(committed_in(files), default=0)
                if record:
                    self._parts(files, step)
                if record and not ahead:
                    self._metrics(files)
                small = {name: told for name, told in files.items() if is_small(name)}
                self._fetch_unseen(
                    {name: told for name, told in small.items() if not (ahead and (self.folder / name).exists())}
                )
                break
            except MissingError:  # removed since it was listed, for there is a newer one
                continue
        atomic_write(self.folder / _SEEN, json.dumps(self.seen).encode())

    def _fetch_unseen(self, wanted: Mapping[str, Told]) -> None:
        """Those that are not here as the store has them, as far as can be told."""
        new = [
            name
            for name, told in wanted.items()
            if self.seen.get(name) != list(told) or not (self.folder / name).exists()
        ]
        self.store.fetch_all((name, self.folder / name) for name in new if ".." not in name.split("/"))
        self.seen |= {name: list(wanted[name]) for name in new}

    def _checkpoint(self, files: Mapping[str, Told]) -> int:
        """Have the newest checkpoint that is whole, and none that the store lacks behind it; its step."""
        newest, damage, saved = 0, None, committed_in(files)
        for step in reversed(saved):
            here = self.folder / CHECKPOINTS / step_name(step)
            try:
                self._bring_checkpoint(saved[step], here)
            except DamagedDataError as error:
                damage = error
                print(f"note     {error}; the checkpoint before it counts in its place", file=sys.stderr)
                aside(here).mkdir(parents=True, exist_ok=True)  # by which a driver may remove it there
                continue
            shutil.rmtree(aside(here), ignore_errors=True)
            newest = step
            break
        if damage and not newest:
            raise DamagedDataError(f"{damage}; {self.store.name('')} has no other checkpoint that is whole")
        for later in committed(self.folder / CHECKPOINTS):
            if step_of(later) > newest:
                shutil.rmtree(later)
        remove_old(self.folder / CHECKPOINTS, 1)
        return newest

    def _bring_checkpoint(self, name: str, here: Path) -> None:
        arriving = here.parent / _ARRIVING / here.name
        meta = self.store.read(f"{name}/{META}")
        if _is_same(here, meta):
            return
        for left in reversed(range(_MOST_DAMAGED)):
            shutil.rmtree(arriving.parent, ignore_errors=True)
            arriving.mkdir(parents=True)
            try:
                atomic_write(arriving / META, meta)
                self._fetch_files(name, arriving)
                check_whole(arriving)
                break
            except DamagedDataError as error:
                if not left:
                    raise DamagedDataError(str(error).replace(str(arriving), self.store.name(name))) from None
        shutil.rmtree(here, ignore_errors=True)
        arriving.rename(here)
        arriving.parent.rmdir()

    def _fetch_files(self, name: str, arriving: Path) -> None:
        try:
            self.store.fetch_all((f"{name}/{file}", arriving / file) for file in read_meta(arriving)["files"])
        except MissingError as error:
            if self.store.has(f"{name}/{META}"):  # what says that all of it is there: it was not just removed
                raise DamagedDataError(str(error)) from None
            raise

    def _parts(self, files: Mapping[str, Told], step: int) -> None:
        """Have the parts of the record up to `step`, and no others."""
        wanted = {
            name: told
            for name, told in files.items()
            if name.partition("/")[0] in DATASETS and not is_behind(name, step)
        }
        for part in (part for dataset in DATASETS for part in (self.folder / dataset).glob("*.parquet")):
            if f"{part.parent.name}/{part.name}" not in wanted:
                part.unlink()
        self._fetch_unseen(wanted)

    def _metrics(self, files: Mapping[str, Told]) -> None:
        """Have the live record begin with what the store has of it; what is behind that stays, where it is the same."""
        chain = chained({name: told for name, told in files.items() if name.startswith(f"{METRICS}/")})
        if all(self.seen.get(part) == list(files[part]) for part in chain) and (self.folder / METRICS).exists():
            return
        content, path = b"".join(self.store.read(part) for part in chain), self.folder / METRICS
        if not path.exists() or path.read_bytes()[: len(content)] != content:
            atomic_write(path, content)
        self.seen |= {part: list(files[part]) for part in chain}


def _is_same(checkpoint: Path, meta: bytes) -> bool:
    """Whether a checkpoint is here, with this meta.json and all of its bytes."""
    if not (checkpoint / META).is_file() or (checkpoint / META).read_bytes() != meta:
        return False
    try:
        check_whole(checkpoint)
    except DamagedDataError:
        return False
    return True
