"""A process that cleans up after the Ray of another: `python cleanup.py FOLDER`, a pipe from that other as its input.

The input ends when the other process does, also when that is killed. What runs on the folder is then killed, for Ray's
agents would stay for a minute, and the folder is removed, which would stay for ever. Run as a file: needs no Ray.
"""

import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

FOLDER_VARIABLE = "TOKENDROP_RAY_FOLDER"
_ROUNDS, _ROUND_S = 50, 0.1


def processes_on(folder: str) -> list[psutil.Process]:
    """Processes whose environment names the folder, and Ray's agents, which hide theirs, by their open files."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended by now, or is somebody else's
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == psutil.Process().pid:
                continue
            is_agent = " ".join(process.cmdline()).startswith("ray::")
            if process.environ().get(FOLDER_VARIABLE) == folder or (
                is_agent and any(file.path.startswith(folder) for file in process.open_files())
            ):
                found.append(process)
    return found


def clean_up(folder: str) -> None:
    """Kill what runs on the folder, and remove it."""
    for _ in range(_ROUNDS):  # what is killed may have started others first
        for process in (left := processes_on(folder)):
            with suppress(psutil.Error):
                process.kill()
        if not left:
            break
        time.sleep(_ROUND_S)
    shutil.rmtree(Path(folder), ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clean_up(sys.argv[1])
