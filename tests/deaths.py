"""Processes that SIGKILL ends between two changes of the files in a folder."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

_CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir")


def die_before(number: int | None, folder: Path, log: Path) -> None:
    """End this process, by no exception, before it changes the files below `folder` for the nth time, from 0.

    A change is a file opened to be written, a file written through to the disk, and whatever is made, renamed or
    removed; each is noted in `log` first. None: it is noted, and the process lives.
    """
    noted = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    changes = 0

    def note(what: str, path: str) -> None:
        nonlocal changes
        if not path.startswith(f"{folder}/"):
            return
        os.write(noted, f"{what} {os.path.relpath(path, folder)}\n".encode())
        if changes == number:
            os.kill(os.getpid(), signal.SIGKILL)
        changes += 1

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and flags & (os.O_WRONLY | os.O_RDWR):
                note("open", os.fsdecode(path))
        elif event in _CHANGES:
            path, within = os.fsdecode(arguments[0]), arguments[-1]
            is_relative = isinstance(within, int) and within >= 0 and event != "os.mkdir"
            note(event.removeprefix("os."), os.path.join(_path_of(within), path) if is_relative else path)

    def fsync(file: int, write_through: Any = os.fsync) -> None:  # of which Python's auditing does not tell
        note("fsync", _path_of(file))
        write_through(file)

    sys.addaudithook(hear)
    os.fsync = fsync


def _path_of(file: int) -> str:
    return os.readlink(f"/proc/self/fd/{file}")
