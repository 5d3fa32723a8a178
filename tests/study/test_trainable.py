"""What Ray Tune is told of a trial."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from recorded import loss_of, record
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.elastic.control import RunControl
from tokendrop.launch.trainer import Fit
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.study import trainable
from tokendrop.study.reports import RUN, reports_of
from tokendrop.study.trainable import STOPPED, SUMMARY, TrialRun


@pytest.mark.parametrize(("begun", "at"), [(0, 0), (9, 6)], ids=["new", "goes on"])
def test_a_validation_is_told_at_its_own_step_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: int, at: int
) -> None:
    config = replace(experiment(train__length="14 steps"), runs_folder=str(tmp_path / "runs"))
    run = tmp_path / "runs" / "trial-1"
    run.mkdir(parents=True)
    if begun:
        record(run, steps=14, last=begun, validate_every=4)

    def trained(config: ExperimentConfig, ended: Future[dict[str, Any]], trains: threading.Event) -> None:
        record(run, steps=14, first=at, validate_every=4)
        ended.set_result({SUMMARY: {"steps": 14}})

    monkeypatch.setattr(trainable, "_train", trained)
    trial = TrialRun.__new__(TrialRun)  # without what Tune sets up around it
    trial.setup({RUN: "trial-1"}, {"trial-1": config})
    told = [trial.step()]
    while not told[-1]["done"]:
        told.append(trial.step())
    validated = {one["layer_tokens"]: one["val_loss"] for one in told if "val_loss" in one}
    wanted = [step for step in (4, 8, 12, 14) if step > at]
    assert validated == {config.plan.layer_tokens(step): loss_of(step, 1) for step in wanted}
    assert [one.get(SUMMARY) for one in told] == [None] * (len(told) - 1) + [{"steps": 14}]


def test_only_a_run_that_is_trained_here_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is another process that trains it, and this one waits for its lock."""
    config = replace(experiment(), runs_folder=str(tmp_path / "runs"))
    run = tmp_path / "runs" / "trial-1"
    run.mkdir(parents=True)
    control, has_lock = RunControl(run), threading.Event()
    control.reset()  # as the other process has it

    def run_training(config: ExperimentConfig, *, fit: Fit) -> dict[str, Any]:
        has_lock.wait()
        fit(cast(WorkerSpec, None), control)
        return {}

    def fit(spec: WorkerSpec, control: RunControl) -> None:
        while not control.is_stopped:
            time.sleep(0.01)

    monkeypatch.setattr(trainable, "run_training", run_training)
    monkeypatch.setattr(trainable, "fit_in_this_process", fit)
    trial = TrialRun.__new__(TrialRun)
    trial.setup({RUN: "trial-1"}, {"trial-1": config})
    assert not trial.step()["done"]
    cleaning = threading.Thread(target=trial.cleanup, daemon=True)
    cleaning.start()
    cleaning.join(0.6)
    assert cleaning.is_alive()
    assert not control.is_stopped
    has_lock.set()
    cleaning.join(10)
    assert not cleaning.is_alive()
    assert trial.step()[STOPPED]


def test_the_validations_of_a_run_are_known_once_each(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "trial-1"
    record(run, steps=14, last=9, validate_every=4)
    record(run, steps=14, first=6, validate_every=4)  # from the last checkpoint on
    known = reports_of(run, experiment().task)
    plan = experiment(train__length="14 steps").plan
    assert [(one["step"], one["val_loss"]) for one in known] == [(step, loss_of(step, 1)) for step in (4, 8, 12, 14)]
    assert [one["layer_tokens"] for one in known] == [plan.layer_tokens(step) for step in (4, 8, 12, 14)]
