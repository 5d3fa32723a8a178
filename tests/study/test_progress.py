"""What becomes of trials, as Ray Tune tells of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps import trials_of, write_sweep
from tokendrop.study.progress import Progress
from tokendrop.study.record import SweepRecord
from tokendrop.study.reports import RUN
from tokendrop.study.sweep import load_sweep
from tokendrop.study.trainable import DETAILS, FAILURE, STOPPED, SUMMARY


@pytest.mark.parametrize(
    ("last", "where"),
    [
        ({}, "stopped"),  # Tune ends it: a scheduler has said so
        ({STOPPED: True}, "open"),
        ({SUMMARY: {"val_loss": 3.0}}, "summaries"),
        ({FAILURE: "out of memory", DETAILS: ""}, "failures"),
    ],
    ids=["by a scheduler", "from elsewhere", "well", "badly"],
)
def test_a_trial_ends_in_one_way(tmp_path: Path, last: dict[str, Any], where: str) -> None:
    path = write_sweep(tmp_path, scheduler={"kind": "asha"})
    sweep, trials = load_sweep(path), trials_of(path)
    record = SweepRecord(tmp_path / "runs", sweep.name)
    record.folder.mkdir(parents=True)
    progress, run = Progress(sweep, trials, record), trials[0].run
    trial: Any = SimpleNamespace(config={RUN: run})
    progress.on_trial_start(0, [], trial)
    progress.on_trial_result(0, [], trial, {"step": 4, "loss": 3.5, "layer_tokens": 100, "val_loss": 3.4})
    progress.on_trial_result(0, [], trial, {"step": 6, "loss": 3.2, "layer_tokens": 150, **last})
    progress.on_trial_complete(0, [], trial)
    ended = {name: run in getattr(progress, name) for name in ("summaries", "failures", "stopped")}
    assert {**ended, "open": progress.is_open(run)} == {name: name == where for name in [*ended, "open"]}
    assert (record.stopped(run) is not None) == (where == "stopped")
    assert "1 running" not in progress.counts()
