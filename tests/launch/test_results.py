"""What a run writes lies where it was told to, from any folder and on every machine."""

from pathlib import Path

import pytest

from checkouts import make_folder
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.launch import preflight, worker
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.worker import run_worker
from tokendrop.launch.worker_spec import WorkerSpec

TRACKED = ("track.uri=sqlite:///mlflow.db", "data.folder=shards")


def places(folder: Path) -> list[str]:
    config = with_absolute_paths(load_job(folder / "jobs" / "tiny.yaml", TRACKED))
    assert with_absolute_paths(config) == config
    return [config.runs_folder, config.data.folder, config.track.uri or ""]


def test_relative_paths_mean_the_folder_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make_folder(tmp_path / "user")
    monkeypatch.chdir(checkout)
    assert places(checkout) == [f"{checkout}/runs", f"{checkout}/shards", f"sqlite:///{checkout}/mlflow.db"]


def test_a_task_is_a_name_whatever_lies_in_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = make_folder(tmp_path / "user")
    (checkout / "copa").mkdir()
    monkeypatch.chdir(checkout)
    job = load_job(checkout / "jobs" / "tiny.yaml", ["evaluate.tasks=[copa, mine.yaml]", "evaluate.task_data=."])
    assert with_absolute_paths(job).evaluate.tasks == ("copa", f"{checkout}/mine.yaml")


@pytest.mark.parametrize("named", [True, False])
def test_a_submitted_job_keeps_its_results_out_of_the_folder_that_ray_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    copy = make_folder(tmp_path / "working_dir_files" / "_ray_pkg_0")
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TOKENDROP_RESULTS", str(tmp_path / "kept") if named else "")
    monkeypatch.chdir(copy)
    kept = tmp_path / "kept" if named else home / "tokendrop"
    assert places(copy) == [f"{kept}/runs", f"{kept}/shards", f"sqlite:///{kept}/mlflow.db"]


def test_a_submitted_job_reads_what_was_uploaded_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = make_folder(tmp_path / "working_dir_files" / "_ray_pkg_0")
    monkeypatch.chdir(copy)
    job = load_job(copy / "jobs" / "tiny.yaml", ["evaluate={tasks: [copa, mine.yaml], task_data: eval, include: more}"])
    assert with_absolute_paths(job).evaluate == job.evaluate


def test_what_checkpoints_are_evaluated_on_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "user")
    monkeypatch.chdir(folder)
    for name in ("mine.yaml", "text/a.txt", "ignored/mine.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / ".gitignore").write_text("/ignored/\n")
    upload = preflight.list_upload(".")

    def job(*given: str) -> ExperimentConfig:
        return load_job("jobs/tiny.yaml", ["data.corpus=[python]", *(f"evaluate.{one}" for one in given)])

    preflight.check_read(job("tasks=[copa, mine.yaml, /there/a.yaml]", "task_data=text", "include=/there"), upload)
    given = preflight.absolute_paths(job("tasks=[copa, mine.yaml]", "include=text"), folder)
    assert {f'evaluate.tasks=["copa", "{folder}/mine.yaml"]', f'evaluate.include="{folder}/text"'} <= {*given}
    with pytest.raises(UserError, match=r"^evaluate\.tasks: .*/ignored/mine\.yaml is left out of the upload"):
        preflight.check_read(job("tasks=[ignored/mine.yaml]"), upload)
    for key in ("task_data", "include"):
        with pytest.raises(UserError, match=rf"^evaluate\.{key}: ignored is on this machine and not in the upload"):
            preflight.check_read(job("tasks=[copa]", f"{key}=ignored"), upload)


def test_a_worker_that_does_not_see_the_runs_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_SEEN_WITHIN_S", 0.0)
    config = load_job(make_folder(tmp_path / "user") / "jobs" / "tiny.yaml")
    with pytest.raises(
        UserError, match=r"^runs_folder: \S+/elsewhere does not exist on \S+, where a worker runs; want "
    ):
        run_worker(WorkerSpec(config=config, run=tmp_path / "elsewhere", data=tmp_path))
