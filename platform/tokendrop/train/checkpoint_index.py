"""Checkpoints as folders: their names, what they say of themselves, which of them count. Needs no torch."""

import fcntl
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any

from tokendrop.errors import DamagedDataError, UserError
from tokendrop.train.sealed import NO_FILE, file_sha256, read_sealed_json, seal_json, write_synced

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
META = "meta.json"
_NAME = re.compile(r"step_(\d{9,})")
_FILE = re.compile(r"\w[\w.]*")  # a file of a checkpoint: a plain name, which can't lead out of the folder
_THREADS = 8  # that read a checkpoint to compare it with its checksums


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:09d}"


def is_checkpoint(path: Path) -> bool:
    """Whether it has the name of a committed checkpoint; it may be damaged."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def committed(folder: Path) -> list[Path]:
    """Committed checkpoints below `folder`, whole or damaged, oldest first."""
    return sorted(filter(is_checkpoint, folder.glob("step_*")), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


@contextmanager
def kept(checkpoint: Path) -> Iterator[None]:
    """While the block runs, `remove_old` leaves a checkpoint; so it does no more where this process dies in it.

    Raises:
        UserError: it is gone already.
    """
    gone = UserError(f"{checkpoint}: has been removed; want a newer checkpoint")
    try:
        meta = (checkpoint / META).open()
    except FileNotFoundError:
        raise gone from None
    with meta:
        if not _locks(meta, fcntl.LOCK_SH) or not (checkpoint / META).exists():
            raise gone
        yield


def remove_old(folder: Path, keep: int) -> None:
    """Remove all committed checkpoints but the newest ones, and but those that somebody has `kept`."""
    for old in committed(folder)[:-keep]:
        try:
            meta = (old / META).open("r+")
        except OSError:  # it is damaged
            shutil.rmtree(old, ignore_errors=True)
            continue
        with meta:
            if _locks(meta, fcntl.LOCK_EX):
                shutil.rmtree(old, ignore_errors=True)  # what can't be removed just now goes next time


@contextmanager
def kept_by_nobody(folder: Path) -> Iterator[None]:
    """Around the removal of all checkpoints below `folder`: while the block runs, none of them can be `kept`.

    Raises:
        UserError: somebody has one kept already.
    """
    with ExitStack() as locks:
        for checkpoint in committed(folder):
            try:
                meta = locks.enter_context((checkpoint / META).open("r+"))
            except OSError:  # it is damaged, and nobody's
                continue
            if not _locks(meta, fcntl.LOCK_EX):
                raise UserError(f"{checkpoint}: another process reads it; want its end first")
        yield


def _locks(file: IO[str], kind: int) -> bool:
    """Whether nobody has a lock that forbids this one; on a file system without locks nobody has."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def newest_whole(folder: Path) -> Path | None:
    """The newest committed checkpoint below `folder` that is not damaged, for callers that do not read it at once.

    All of its bytes are read and compared with their checksums, once in a process as long as the files stay as they
    are. Those that are passed over are told of on standard error.

    Raises:
        DamagedDataError: there are checkpoints, and none is whole.
    """
    return _newest(folder, check_whole)


def newest_complete(folder: Path) -> Path | None:
    """The checkpoint that a run goes on from: the newest committed one below `folder` whose files are all there.

    Whoever asks comes to the same one. What is in the files is compared with its checksums by the workers, as they
    read it.

    Raises:
        DamagedDataError: there are checkpoints, and none is complete.
    """
    return _newest(folder, check_complete)


def _newest(folder: Path, check: Callable[[Path], object]) -> Path | None:
    damages: list[DamagedDataError] = []
    for checkpoint in reversed(committed(folder)):
        try:
            if checkpoint.is_symlink():
                raise DamagedDataError(f"{checkpoint}: a link; want the checkpoint's own folder")
            check(checkpoint)
        except DamagedDataError as error:
            if not checkpoint.is_dir():  # a newer one has been committed, and this one removed
                return _newest(folder, check)
            damages.append(error)
            continue
        for damage in damages:
            _tell(f"note     {damage}; {checkpoint.name} counts in its place")
        return checkpoint
    if damages:
        raise DamagedDataError(f"{damages[0]}; {folder} has no other checkpoint that is whole")
    return None


def latest_checkpoint(path: Path) -> Path:
    """The newest whole checkpoint of a run folder, or the checkpoint that `path` is itself.

    Raises:
        UserError: there is none.
        DamagedDataError: it is damaged, or all of the run's are.
    """
    if (path / META).is_file() or is_checkpoint(path):
        check_whole(path)
        return path
    newest = newest_whole(path / CHECKPOINTS)
    if newest is None:
        raise UserError(f"{path}: want a run folder with a committed checkpoint, or a checkpoint; found none")
    return newest


def aside(checkpoint: Path) -> Path:
    """Where a checkpoint lies once it has proved damaged."""
    return checkpoint.with_name(f"{checkpoint.name}.damaged")


def set_aside(newest: Path) -> None:
    """Give the suffix `.damaged` to the checkpoints after the newest one that counts."""
    saved = committed(newest.parent)
    for damaged in saved[saved.index(newest) + 1 :]:
        shutil.rmtree(aside(damaged), ignore_errors=True)
        damaged.rename(aside(damaged))


def committed_step(folder: Path) -> int:
    """Steps done by the checkpoint that a run goes on from, 0 without one; raises as `newest_complete` does."""
    newest = newest_complete(folder)
    return read_meta(newest)["step"] if newest else 0


def write_meta(
    checkpoint: Path, meta: Mapping[str, Any], files: Mapping[str, str], sizes: Mapping[str, int] | None = None
) -> None:
    """Write what a checkpoint says of itself; last of its files, when all others are there.

    Args:
        meta: JSON; `step` is the step of the folder's name.
        files: the SHA-256 of each other file, by name.
        sizes: bytes of files that may lie on other machines; the others are looked at.
    """
    known = sizes or {}
    entries = {
        name: {"bytes": known[name] if name in known else (checkpoint / name).stat().st_size, "sha256": files[name]}
        for name in sorted(files)
    }
    write_synced(checkpoint / META, seal_json({**meta, "files": entries}))


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: `step`, what its run said of it, and as `files` each file's bytes and SHA-256.

    Raises:
        UserError: this is no committed checkpoint.
        DamagedDataError: it is damaged, or has the name of another step.
    """
    if not (checkpoint / META).is_file() and not is_checkpoint(checkpoint):
        raise UserError(f"{checkpoint}: not a checkpoint (no readable {META} in it)")
    meta = read_sealed_json(checkpoint / META)
    step, files = meta.get("step"), meta.get("files")
    if not isinstance(step, int) or checkpoint.name != step_name(step):
        raise DamagedDataError(f"{checkpoint / META}: want the step of the folder's name, found {step!r}")
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise DamagedDataError(f"{checkpoint / META}: want the bytes and the SHA-256 of each file, by plain names")
    return meta


def check_whole(checkpoint: Path) -> None:
    """Check that each file of a checkpoint is what was written; all of them are read.

    Raises:
        DamagedDataError: one is not; it is named.
        OSError: storage that can't be read just now, which says nothing of the checkpoint.
    """
    damaged = _damaged_files(checkpoint, tuple(check_complete(checkpoint)))
    if damaged:
        raise DamagedDataError(f"{checkpoint / damaged[0]}: damaged; its checksum is not the one in {META}")


def check_complete(checkpoint: Path) -> list[tuple[str, str, int]]:
    """Check that each file of a checkpoint is there, as long as it was written; raises as `check_whole` does.

    Returns:
        Name, SHA-256 and time of change of each.
    """
    found: list[tuple[str, str, int]] = []
    for name, entry in read_meta(checkpoint)["files"].items():
        path = checkpoint / name
        try:
            status = path.lstat()
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise DamagedDataError(f"{path}: this part of a checkpoint can't be read ({error.strerror})") from None
        if path.is_symlink() or not path.is_file() or status.st_size != entry["bytes"]:
            what = "a link" if path.is_symlink() else f"{status.st_size} bytes"
            raise DamagedDataError(f"{path}: damaged; want a file of {entry['bytes']} bytes, found {what}")
        found.append((name, entry["sha256"], status.st_mtime_ns))
    return found


@lru_cache(maxsize=64)
def _damaged_files(checkpoint: Path, files: tuple[tuple[str, str, int], ...]) -> list[str]:
    """Names of those with another SHA-256.

    Args:
        files: name, SHA-256 and time of change of each; by the last, files that change are read anew.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda file: file_sha256(checkpoint / file[0]), files)
        return [file[0] for file, sha256 in zip(files, found, strict=True) if sha256 != file[1]]


def _is_entry(name: Any, entry: Any) -> bool:
    types = {"bytes": int, "sha256": str}
    return (
        _FILE.fullmatch(name) is not None
        and isinstance(entry, dict)
        and entry.keys() == types.keys()
        and all(isinstance(entry[key], kind) for key, kind in types.items())
    )


@cache
def _tell(sentence: str) -> None:
    """Once: who waits for nodes asks again and again."""
    print(sentence, file=sys.stderr, flush=True)
