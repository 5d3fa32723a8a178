"""What `checkpoint.keep` removes, and what it leaves because somebody reads it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.errors import UserError
from tokendrop.train.checkpoint_index import committed, kept, remove_old, step_name, step_of

PLATFORM = str(Path(__file__).parents[2] / "platform")
HOLD = """
import sys, time
from pathlib import Path
from tokendrop.train.checkpoint_index import kept
with kept(Path(sys.argv[1])):
    print("kept", flush=True)
    time.sleep(60)
"""


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / step_name(step)
    path.mkdir(parents=True, exist_ok=True)
    (path / "meta.json").write_text(json.dumps({"step": step}))
    (path / "weights").write_bytes(b"weights")
    return path


@given(st.sets(st.integers(1, 9)), st.sets(st.integers(1, 9)), st.integers(1, 4))
def test_the_newest_and_those_that_somebody_keeps_stay(tmp_path_factory, steps, wanted, keep):
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {step: checkpoint(folder, step) for step in steps}
    held = [kept(paths[step]) for step in steps & wanted]
    for one in held:
        one.__enter__()

    remove_old(folder, keep)
    left = {step_of(path) for path in committed(folder)}
    for one in held:
        one.__exit__(None, None, None)
    remove_old(folder, keep)

    newest = set(sorted(steps)[-keep:])
    assert left == newest | (steps & wanted)
    assert {step_of(path) for path in committed(folder)} == newest


def test_one_that_is_damaged_is_removed_too(tmp_path):
    (checkpoint(tmp_path, 1) / "meta.json").unlink()
    checkpoint(tmp_path, 2)

    remove_old(tmp_path, 1)

    assert [path.name for path in committed(tmp_path)] == [step_name(2)]


def test_a_reader_that_is_killed_keeps_nothing(tmp_path):
    old, new = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    reader = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(old)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": PLATFORM}
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"kept\n"

    remove_old(tmp_path, 1)
    assert committed(tmp_path) == [old, new]
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    remove_old(tmp_path, 1)
    assert committed(tmp_path) == [new]


def test_one_that_is_gone_can_not_be_kept(tmp_path):
    with pytest.raises(UserError, match="has been removed; want a newer checkpoint"), kept(tmp_path / step_name(3)):
        pass
    with pytest.raises(FileNotFoundError), kept(checkpoint(tmp_path, 4)):
        raise FileNotFoundError("of the block itself")
