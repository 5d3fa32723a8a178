"""One process at a time in a folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokendrop.atomic import LOCK, exclusive_lock, is_locked
from tokendrop.errors import UserError

HOLD = """
import sys, time
from pathlib import Path
from tokendrop.atomic import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(folder: Path, *, seconds: float) -> subprocess.Popen[str]:
    """Another process, at work on the folder for so long."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_gone_however_it_went(tmp_path: Path) -> None:
    with holder(tmp_path, seconds=60) as other:
        with pytest.raises(UserError, match=rf"^{tmp_path}: another process is at work on it; want "):
            exclusive_lock(tmp_path, patience_s=0).__enter__()
        other.kill()
        other.wait()
        with exclusive_lock(tmp_path, patience_s=0):
            pass


def test_a_process_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path, seconds=0.5), exclusive_lock(tmp_path, patience_s=30):
        pass


def test_who_waits_can_be_stopped(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    with holder(tmp_path, seconds=60) as other:
        with pytest.raises(InterruptedError):
            exclusive_lock(tmp_path, while_waiting=stop).__enter__()
        other.kill()


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"/file/below: can't write there \(Not a directory\)$"):
        exclusive_lock(tmp_path / "file" / "below").__enter__()


def test_who_asks_sees_whether_a_process_is_at_work_and_stops_nobody(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert not (tmp_path / LOCK).exists()
    with holder(tmp_path, seconds=60) as other:
        assert is_locked(tmp_path)
        other.kill()
        other.wait()
    assert not is_locked(tmp_path)
    exclusive_lock(tmp_path, patience_s=0).__enter__()
