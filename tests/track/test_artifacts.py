"""The files that describe a run, in MLflow: one that fails stops nothing and is tried again."""

import json
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from tokendrop.track.environment import describe_driver, describe_workers
from tokendrop.track.mlflow import MlflowMirror
from tokendrop.track.run_folder import ENVIRONMENT, JOB, PLAN
from tokendrop.train.device import describe_device
from track.test_mlflow import history, run_folder, train_on


def artifacts(uri: str, run_id: str | None) -> set[str]:
    assert run_id is not None
    return {artifact.path for artifact in MlflowClient(uri).list_artifacts(run_id)}


@pytest.mark.parametrize("name", [JOB, PLAN, ENVIRONMENT])
def test_an_artifact_that_fails_stops_nothing_else_and_is_tried_again(tmp_path: Path, sqlite: str, name: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    train_on(folder, range(1, 9), commit=8)
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    (folder / name).mkdir()  # no file, so it can't be sent
    mirror = MlflowMirror(folder, config)
    with pytest.raises(OSError, match=name):
        mirror.sync("FINISHED")
    assert mirror.run_id is not None
    assert set(history(sqlite, mirror.run_id, "loss/train")) == set(range(1, 9))
    run = MlflowClient(sqlite).get_run(mirror.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == str(config.seed)
    assert artifacts(sqlite, mirror.run_id) == {JOB, PLAN, ENVIRONMENT} - {name}

    (folder / name).rmdir()
    (folder / name).write_bytes(whole)
    MlflowMirror(folder, config).sync()
    assert artifacts(sqlite, mirror.run_id) == {JOB, PLAN, ENVIRONMENT}


def test_an_artifact_is_sent_once_and_again_when_it_changes(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    mirror = MlflowMirror(folder, config)
    mirror.sync()
    (sent,) = (tmp_path / "mlruns").rglob(ENVIRONMENT)
    first = sent.stat().st_mtime_ns
    MlflowMirror(folder, config).sync()
    assert sent.stat().st_mtime_ns == first
    describe_workers(folder / ENVIRONMENT, {"type": "cuda", "name": "a GPU"})
    MlflowMirror(folder, config).sync()
    assert json.loads(sent.read_text())["workers"]["device"]["name"] == "a GPU"


def test_the_environment_has_what_the_driver_and_what_the_workers_see(tmp_path: Path) -> None:
    path = tmp_path / ENVIRONMENT
    describe_driver(path)
    describe_workers(path, describe_device(torch.device("cpu")))
    describe_driver(path)  # as a resume does, before there are workers
    known = json.loads(path.read_text())
    for one in (known, known["workers"]):
        assert one["packages"]["torch"] == torch.__version__
        assert one["cpus"] > 0
    device = known["workers"]["device"]
    assert (device["type"], device["threads"]) == ("cpu", torch.get_num_threads())
    assert device["name"]
    assert device["capability"] == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_a_damaged_environment_is_found_out_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ENVIRONMENT
    path.write_bytes(content)
    describe_workers(path, {"type": "cpu"})
    assert json.loads(path.read_text())["workers"]["device"] == {"type": "cpu"}
