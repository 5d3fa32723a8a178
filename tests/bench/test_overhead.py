"""`tokendrop bench overhead`: who trains in turns is measured in its own turns alone."""

import json
import sys
import time
from pathlib import Path

import pytest

from tokendrop.bench import overhead
from tokendrop.bench.figures import interleave

ROOT = Path(__file__).parents[2]
STEP_S = 0.02
STEPS = f"""
import json, sys, time
from itertools import count
for step in count(1):
    time.sleep({STEP_S})
    print(json.dumps({{"step": step, "time": time.time(), "step_time_s": {STEP_S}}}), flush=True)
"""


def lines(folder: Path) -> list[float]:
    return [json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]]


def command(folder: Path) -> list[str]:
    folder.mkdir()
    return ["/bin/sh", "-c", f"exec {sys.executable} -c '{STEPS}' > {folder / 'metrics.jsonl'}"]


def test_trainers_go_on_in_their_turns_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_TURN_S", 0.5)
    a, b = tmp_path / "a", tmp_path / "b"
    with overhead._trainer(command(a), a) as one, overhead._trainer(command(b), b) as other:
        begun = time.time()
        speeds = interleave({"a": one.turn, "b": other.turn}, rounds=2, log=lambda text: None)
        ended = time.time()
        assert all(0.2 / STEP_S < speed <= 1 / STEP_S for values in speeds.values() for speed in values)
        assert (one.mean_step_s(), other.mean_step_s()) == pytest.approx((STEP_S, STEP_S))
    done = sorted((at, name) for name, folder in (("a", a), ("b", b)) for at in lines(folder) if begun < at < ended)
    turns = [name for number, (_, name) in enumerate(done) if number == 0 or done[number - 1][1] != name]
    assert turns == ["a", "b", "a"]  # every other round runs backwards


def test_a_step_that_is_longer_than_a_turn_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_TURN_S", STEP_S / 4)
    with overhead._trainer(command(tmp_path / "slow"), tmp_path / "slow") as slow:
        assert slow.turn() == pytest.approx(1 / STEP_S)


def test_the_bare_loop_trains_whatever_the_task(tmp_path: Path) -> None:
    folder, job = tmp_path / "bare", "jobs/pretrain/bert_tiny_baseline.yaml"
    command = [sys.executable, "-m", "tokendrop.bench.overhead", str(folder), str(ROOT / job)]
    with overhead.psutil.Popen(command) as process:
        while not (folder / "metrics.jsonl").exists() or not lines(folder):
            assert process.poll() is None
            time.sleep(0.2)
        process.kill()


def test_one_that_ends_by_itself_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(overhead.subprocess.CalledProcessError), overhead._trainer(["/bin/false"], tmp_path):
        pass
