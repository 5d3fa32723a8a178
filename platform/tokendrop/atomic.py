"""Folders and files that appear whole or not at all, and that one process at a time writes."""

import errno
import fcntl
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from tokendrop.errors import UserError

LOCK = ".lock"
_POLL_S = 0.1


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `folder` when the block ends well and goes when it does not.

    Where another process was first, its folder stays: both hold the same.

    Raises:
        UserError: nothing can be written there.
    """
    partial = folder.with_name(f"{folder.name}.partial-{uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: can't make this folder ({error.strerror or error})") from None
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def exclusive_lock(
    folder: Path,
    *,
    name: str = LOCK,
    patience_s: float = math.inf,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Around work on a folder: one process at a time, on any machine; one that is killed leaves it to the next.

    Args:
        name: of the lock's file; work under another name may go on at once.
        patience_s: so long another process is waited for.
        while_waiting: called again and again until then; the wait ends with what it raises.
    Raises:
        UserError: nothing can be written there, or another process is at work.
    """
    deadline = time.monotonic() + patience_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / name).open("w")
    except OSError as error:
        raise UserError(f"{folder}: can't write there ({error.strerror or error})") from None
    with lock:
        while not _locks(lock):
            if time.monotonic() > deadline:
                raise UserError(f"{folder}: another process is at work on it; want that stopped, or its end, first")
            while_waiting()
            time.sleep(_POLL_S)
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process, on any machine, holds the `exclusive_lock` of a folder."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # beside others who ask; the end of the block frees it
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def _locks(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(f"{lock.name}: can't be locked ({error.strerror}); want a file system with flock") from None
    return True


def atomic_write(path: Path, content: Any) -> None:
    """Write a file that is there whole or not at all, even where the machine stops."""
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove the files that `atomic_write` left in a folder when it was killed; nobody else may be writing there."""
    for path in folder.glob(".*.????????"):
        path.unlink(missing_ok=True)
