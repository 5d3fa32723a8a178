"""Run folders that a job names."""

from pathlib import Path

import pytest

from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import dump_job
from tokendrop.errors import UserError
from tokendrop.track.run_folder import DATA, JOB, begun_run, create_run_folder
from tokendrop.train.sealed import seal_text


def named(tmp_path: Path, **changes: object) -> ExperimentConfig:
    return experiment(runs_folder=str(tmp_path), run="mine", **changes)


def begin(config: ExperimentConfig) -> Path:
    """As far as a driver has come when its run counts as begun."""
    folder = create_run_folder(config)
    (folder / JOB).write_text(seal_text(dump_job(config)))
    (folder / DATA).write_text(seal_text("/shards\n"))
    return folder


def test_a_run_is_begun_once(tmp_path: Path) -> None:
    config = named(tmp_path)
    assert begun_run(config) is None
    folder = begin(config)
    assert begun_run(config) == folder == tmp_path / "mine"


def test_a_driver_that_dies_before_it_has_begun_its_run_leaves_it_to_be_begun(tmp_path: Path) -> None:
    config = named(tmp_path)
    (create_run_folder(config) / JOB).write_text("")
    assert begun_run(config) is None
    assert create_run_folder(config) == tmp_path / "mine"


def test_a_folder_of_another_job_or_of_something_else_is_refused(tmp_path: Path) -> None:
    begin(named(tmp_path))
    with pytest.raises(UserError, match=r"^run: .*/mine is one of the job 'tiny', this is 'other'; want "):
        begun_run(named(tmp_path, name="other"))
    (tmp_path / "data" / "shards").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^run: .*/data is no run folder, and not empty; want another name$"):
        begun_run(experiment(runs_folder=str(tmp_path), run="data"))


def test_without_a_name_each_start_is_a_run_of_its_own(tmp_path: Path) -> None:
    config = experiment(runs_folder=str(tmp_path))
    assert begun_run(config) is None
    assert create_run_folder(config) != create_run_folder(config)
