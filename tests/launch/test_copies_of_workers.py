"""Workers of a run that a store keeps work on the copy of their own driver, or on none."""

import threading
from pathlib import Path

import pytest

from runs import config_of, write_job
from tokendrop.errors import UserError
from tokendrop.launch import stored
from tokendrop.launch.stored import check_store, home_of_worker
from tokendrop.track.run_home import write_home

ADDRESS = "s3://bucket/runs/one"


def test_a_worker_takes_the_copy_of_its_driver(tmp_path: Path) -> None:
    write_home(tmp_path, ADDRESS, "this driver")
    home = home_of_worker(tmp_path, "this driver")
    assert home is not None
    assert home.address == ADDRESS
    assert home_of_worker(tmp_path, None) is None


def test_a_worker_waits_for_shared_storage_to_show_its_driver(tmp_path: Path) -> None:
    write_home(tmp_path, ADDRESS, "an earlier driver")
    late = threading.Timer(0.5, write_home, (tmp_path, ADDRESS, "this driver"))
    late.start()
    home = home_of_worker(tmp_path, "this driver")
    assert home is not None
    assert home.driver == "this driver"
    late.join()


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_worker_that_sees_another_machine_s_folder_or_none_is_refused(
    tmp_path: Path, has_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "SEEN_WITHIN_S", 0.0)
    if has_copy:  # of an earlier driver, on a disk of this machine alone
        write_home(tmp_path, ADDRESS, "an earlier driver")
    with pytest.raises(UserError, match=rf"^runs_folder: a worker on \S+ does not see {tmp_path}, the copy of the run"):
        home_of_worker(tmp_path, "this driver")


def test_tasks_are_not_evaluated_beside_a_run_that_a_store_keeps(tmp_path: Path) -> None:
    config = config_of(write_job(tmp_path), "runs_folder=s3://bucket/runs", "evaluate.tasks=[piqa]")
    with pytest.raises(UserError, match=r"^evaluate\.tasks: a run that a store keeps is evaluated once it is trained"):
        check_store(config, None)


def test_tasks_are_evaluated_beside_a_run_in_its_folder_whatever_its_job_says_of_new_ones(tmp_path: Path) -> None:
    config = config_of(write_job(tmp_path), "runs_folder=s3://bucket/runs", "evaluate.tasks=[piqa]")
    (tmp_path / "run").mkdir()
    check_store(config, tmp_path / "run")
