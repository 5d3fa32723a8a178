"""The table of a sweep's arms on a terminal, while it goes on."""

import os
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

import corpora
import sweeps
from tokendrop.study.arms import arms_of
from tokendrop.study.live import arms_table
from tokendrop.study.sweep import load_sweep

ROOT = Path(__file__).parents[2]


@settings(max_examples=25)
@given(seeds=st.integers(1, 3), rates=st.integers(2, 16), chosen=st.data())
def test_arms_that_train_come_first_then_the_best_and_none_is_forgotten(tmp_path_factory, seeds, rates, chosen):
    rate = [n / 1000 for n in range(1, rates + 1)]
    path = sweeps.write_sweep(tmp_path_factory.mktemp("sweep"), axes={"train.peak_lr": rate}, seeds=seeds)
    trials = sweeps.trials_of(path)
    states = chosen.draw(st.lists(st.sampled_from("rdfo"), min_size=len(trials), max_size=len(trials)))
    of = {state: [one for one, is_ in zip(trials, states, strict=True) if is_ == state] for state in "rdfo"}
    done = {one.run: {"val_loss": 3 + one.config.train.peak_lr} for one in of["d"]}
    arms = arms_of(load_sweep(path), trials, done)
    running = {one.run: {"step": 1, "loss": 4.0} for one in of["r"]}
    text = arms_table(arms, "val_loss", running, lower=True, failed=[one.run for one in of["f"]])
    _, _, *lines = text.splitlines()
    shown = lines[:12]
    assert len(shown) == min(12, rates)
    assert lines[12:] == ([f"... and {rates - 12} arms more"] if rates > 12 else [])
    trains = [" at 4.000" in line for line in shown]
    assert trains == sorted(trains, reverse=True)
    assert sum(line.count(" at 4.000") for line in shown) == len(running) or rates > 12
    best = [float(found[1]) for line in shown if " at 4.000" not in line and (found := re.search(r" (3\.\d+)", line))]
    assert best == sorted(best)


@pytest.mark.long
@pytest.mark.ray
def test_a_terminal_shows_every_arm_as_it_trains(tmp_path, ray_cluster):
    corpora.tiny_job(tmp_path, [corpora.write_corpus(tmp_path / "corpus.jsonl", corpora.documents(80))])
    path = sweeps.write_sweep(tmp_path, axes={"train.peak_lr": [1e-3, 0.1]}, seeds=2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "TERM": "xterm"}
    environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 160))
    command = [sys.executable, "-m", "tokendrop", "sweep", str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=theirs) as sweep:
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert sweep.returncode == 0, text
    for arm in ("peak_lr 0.001", "peak_lr 0.1"):
        assert re.search(rf"{arm} +\d of 2 .*seed \d+ \d+%", text), text
    assert "4 trials: 4 finished" in text
    assert re.search(r"\d at once, at work [\d.]+% of the time .* a trial begins [\d.]+ s after the one before", text)


def _read(terminal: int) -> bytes:
    """What a terminal shows next; nothing once nobody writes to it."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
