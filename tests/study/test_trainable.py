"""What Ray Tune is told of a trial."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recorded import loss_of, record
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.study import trainable
from tokendrop.study.reports import reports_of
from tokendrop.study.trainable import RUN, SUMMARY, TrialRun


def test_a_validation_is_told_at_its_own_step_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(experiment(train__length="14 steps"), runs_folder=str(tmp_path / "runs"))
    run = tmp_path / "runs" / "trial-1"
    run.mkdir(parents=True)

    def trained(config: ExperimentConfig, ended: Future[dict[str, Any]]) -> None:
        record(run, steps=14, validate_every=4)
        ended.set_result({SUMMARY: {"steps": 14}})

    monkeypatch.setattr(trainable, "_train", trained)
    trial = TrialRun.__new__(TrialRun)  # without what Tune sets up around it
    trial.setup({RUN: "trial-1"}, {"trial-1": config})
    told = [trial.step()]
    while not told[-1]["done"]:
        told.append(trial.step())
    validated = {one["layer_tokens"]: one["val_loss"] for one in told if "val_loss" in one}
    assert validated == {config.plan.layer_tokens(step): loss_of(step, 1) for step in (4, 8, 12, 14)}
    assert [one.get(SUMMARY) for one in told] == [None] * (len(told) - 1) + [{"steps": 14}]


def test_a_trial_that_goes_on_tells_each_validation_once_those_of_an_earlier_start_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(experiment(train__length="14 steps"), runs_folder=str(tmp_path / "runs"))
    run = tmp_path / "runs" / "trial-1"
    run.mkdir(parents=True)
    record(run, steps=14, last=9, validate_every=4)

    def trained(config: ExperimentConfig, ended: Future[dict[str, Any]]) -> None:
        record(run, steps=14, first=6, validate_every=4)  # from the last checkpoint on
        ended.set_result({SUMMARY: {"steps": 14}})

    monkeypatch.setattr(trainable, "_train", trained)
    trial = TrialRun.__new__(TrialRun)  # without what Tune sets up around it
    trial.setup({RUN: "trial-1"}, {"trial-1": config})
    told = [trial.step()]
    while not told[-1]["done"]:
        told.append(trial.step())
    validated = [{"step": one["step"], "val_loss": one["val_loss"]} for one in told if "val_loss" in one]
    assert validated == [{"step": step, "val_loss": loss_of(step, 1)} for step in (4, 8, 12, 14)]
    known = [{key: one[key] for key in ("step", "val_loss")} for one in reports_of(run, config.task)]
    assert known == validated
