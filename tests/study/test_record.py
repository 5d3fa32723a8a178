"""What a sweep knows of its trials by their run folders and its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeps import trials_of, write_sweep
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.schedule.duration import Duration
from tokendrop.study.progress import Progress
from tokendrop.study.record import SweepRecord, finished
from tokendrop.study.run import _look_up
from tokendrop.study.sweep import load_sweep
from tokendrop.track.run_folder import describe_run


def begun(config: ExperimentConfig, folder: Path) -> Path:
    """A run folder of this job, before its first checkpoint."""
    shards = folder / "shards"
    shards.mkdir(exist_ok=True)
    (shards / "tokenizer.json").write_text("{}")
    run = Path(config.runs_folder) / str(config.run)
    run.mkdir(parents=True, exist_ok=True)
    describe_run(run, config, shards)
    return run


def with_keys(config: ExperimentConfig, branch: str, **keys: Any) -> ExperimentConfig:
    return replace(config, **{branch: replace(getattr(config, branch), **keys)})


@pytest.mark.parametrize(
    ("branch", "keys", "said"),
    [("evaluate", {"sequences": 3}, "evaluate.sequences=3"), ("train", {}, "train.length=")],
    ids=["validated otherwise", "longer"],
)
def test_a_run_that_was_gone_on_with_as_another_job_is_not_taken_for_the_trial(
    tmp_path: Path, branch: str, keys: dict[str, Any], said: str
) -> None:
    trial = trials_of(write_sweep(tmp_path))[0].config
    begun(trial, tmp_path)
    assert finished(trial) is None
    keys = keys or {"length": Duration.parse("77 steps")}
    begun(with_keys(trial, branch, **keys), tmp_path)
    with pytest.raises(UserError, match=rf"^run: .*{trial.run} was gone on with by {said}.*; want it removed$"):
        finished(trial)


def test_what_a_scheduler_has_ended_counts_as_long_as_the_sweep_has_one(tmp_path: Path) -> None:
    for scheduler, is_open in (({"kind": "asha"}, False), (None, True)):
        path = write_sweep(tmp_path, scheduler=scheduler)
        sweep, trials = load_sweep(path), trials_of(path)
        record = SweepRecord(tmp_path / "runs", sweep.name)
        record.folder.mkdir(parents=True, exist_ok=True)
        record.note_stopped(trials[0].run, {"step": 3, "val_loss": 4.0})
        progress = Progress(sweep, trials, record)
        _look_up(trials[0], trials[0].config, progress)
        assert progress.is_open(trials[0].run) == is_open


def test_a_sweep_file_is_the_same_one_however_it_is_named(tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    record = SweepRecord(tmp_path / "runs", "tiny")
    (tmp_path / "below").mkdir()
    other_way = tmp_path / "below" / ".." / path.name
    for first, then in ((path, other_way), (other_way, path)):
        with record.opened(first, trials_of(path)):
            pass
        record.check(then)
    with pytest.raises(UserError, match=r"is the sweep of .*/sweep\.yaml; want another name"):
        record.check(tmp_path / "other.yaml")
