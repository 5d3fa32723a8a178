"""Whether tasks are evaluated beside a run, by where the run is kept."""

from pathlib import Path

import pytest

from runs import config_of, write_job
from tokendrop.errors import UserError
from tokendrop.launch.stored import check_store


def test_tasks_are_not_evaluated_beside_a_run_that_a_store_keeps(tmp_path: Path) -> None:
    config = config_of(write_job(tmp_path), "runs_folder=s3://bucket/runs", "evaluate.tasks=[piqa]")
    with pytest.raises(UserError, match=r"^evaluate\.tasks: a run that a store keeps is evaluated once it is trained"):
        check_store(config, None)


def test_tasks_are_evaluated_beside_a_run_in_its_folder_whatever_its_job_says_of_new_ones(tmp_path: Path) -> None:
    config = config_of(write_job(tmp_path), "runs_folder=s3://bucket/runs", "evaluate.tasks=[piqa]")
    (tmp_path / "run").mkdir()
    check_store(config, tmp_path / "run")
