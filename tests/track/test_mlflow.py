"""A run folder and its mirror in MLflow: real databases, a real server that comes late."""

import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from checkouts import free_ports
from tokendrop.cli import main
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import dump_job, load_job
from tokendrop.launch import watch
from tokendrop.launch.watch import Watcher
from tokendrop.track.journal import Journal
from tokendrop.track.mlflow import METRICS, MlflowMirror, flat
from tokendrop.track.run_folder import DATA, ENVIRONMENT, JOB, PLAN
from tokendrop.train.report import StepReport
from tokendrop.train.sealed import seal_json, seal_text

QUICKSTART = Path(__file__).parents[2] / "jobs" / "pretrain" / "quickstart.yaml"


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        loss=8.0 - step / 10,
        val_loss=7.5 if step % 5 == 0 else None,
        grad_norm=1.0,
        lr=1e-3,
        kept_length=32,
        tokens=step * 100,
        layer_tokens=step * 60,
        flops=step * 1000,
        world_size=1,
        data_time_s=0.0,
        step_time_s=0.1,
    )


def run_folder(tmp_path: Path, uri: str) -> tuple[Path, ExperimentConfig]:
    config = load_job(QUICKSTART, [f"track.uri={uri}"])
    folder = tmp_path / "quickstart-random-ltd-20260101-120000"
    folder.mkdir()
    (folder / JOB).write_text(seal_text(dump_job(config)))
    for name in (PLAN, ENVIRONMENT):
        (folder / name).write_text(seal_json({}))
    return folder, config


def train_on(folder: Path, steps: range, *, commit: int) -> None:
    """What a worker writes: `steps` recorded, those up to `commit` committed."""
    journal = Journal(folder, rank=0, world_size=1, start=steps.start - 1)
    for step in steps:
        journal.record(report(step), [step])
        if step == commit:
            journal.commit(step)


@pytest.fixture
def sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


def history(uri: str, run_id: str, metric: str) -> dict[int, float]:
    return {point.step: point.value for point in MlflowClient(uri).get_metric_history(run_id, metric)}


def test_a_run_restarted_is_one_mlflow_run_with_every_step(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    mirror = MlflowMirror(folder, config)
    train_on(folder, range(1, 9), commit=5)
    mirror.sync()
    train_on(folder, range(6, 13), commit=12)  # a restart from the checkpoint of step 5
    MlflowMirror(folder, config).sync("FINISHED")

    client = MlflowClient(sqlite)
    experiment = client.get_experiment_by_name(config.track.experiment)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == MlflowMirror(folder, config).run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["drop.schedule.start"] == "32"
    assert run.data.tags["method"] == "random_ltd"
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} == {JOB, PLAN, ENVIRONMENT}
    for name, field in METRICS.items():
        wanted = {step: getattr(report(step), field) for step in range(1, 13)}
        assert history(sqlite, run.info.run_id, name) == {s: v for s, v in wanted.items() if v is not None}
    assert history(sqlite, run.info.run_id, "perplexity/validation") == {5: math.exp(7.5), 10: math.exp(7.5)}


def test_what_describes_a_run_is_sent_whole_however_the_first_attempt_ended(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    (folder / ENVIRONMENT).rename(tmp_path / "later")
    mirror = MlflowMirror(folder, config)
    with pytest.raises(OSError, match=ENVIRONMENT):
        mirror.sync()
    (tmp_path / "later").rename(folder / ENVIRONMENT)
    late = MlflowMirror(folder, config)
    late.sync()
    assert mirror.run_id == late.run_id is not None
    client = MlflowClient(sqlite)
    assert client.get_run(late.run_id).data.params == flat(asdict(config))
    assert {artifact.path for artifact in client.list_artifacts(late.run_id)} == {JOB, PLAN, ENVIRONMENT}


def test_artifacts_lie_beside_the_database_wherever_a_run_is_started(
    tmp_path: Path, sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    MlflowMirror(folder, config).sync()
    assert list((tmp_path / "mlruns").rglob(JOB))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_syncing_twice_sends_nothing_twice(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    train_on(folder, range(1, 5), commit=4)
    mirror = MlflowMirror(folder, config)
    mirror.sync()
    mirror.sync()
    assert mirror.run_id is not None
    assert len(MlflowClient(sqlite).get_metric_history(mirror.run_id, "loss/train")) == 4


def test_a_resumed_run_is_running_again(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    train_on(folder, range(1, 5), commit=4)
    mirror = MlflowMirror(folder, config)
    for status in ("FAILED", "RUNNING", "KILLED", "RUNNING", "FINISHED"):
        mirror.sync(status)
        assert mirror.run_id is not None
        assert MlflowClient(sqlite).get_run(mirror.run_id).info.status == status


@contextmanager
def server(folder: Path, port: int) -> Iterator[psutil.Process]:
    """A real MLflow server on `port`, and its process."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None, "the server died"
                time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def test_metrics_wait_for_a_server_that_is_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    uri = f"http://127.0.0.1:{port}"
    folder, config = run_folder(tmp_path, uri)
    (folder / DATA).write_text(seal_text("unused\n"))
    train_on(folder, range(1, 9), commit=8)
    with pytest.raises(Exception, match=r"refused|Max retries"):
        MlflowMirror(folder, config).sync("FINISHED")
    with pytest.raises(SystemExit, match="1"):
        main(["sync", str(folder)])
    assert capsys.readouterr().err.startswith(f"tokendrop: {uri} can't be reached (")
    with server(tmp_path, port):
        main(["sync", str(folder)])
        run_id = MlflowMirror(folder, config).run_id
        assert run_id is not None
        assert capsys.readouterr().out == f"MLflow run {run_id} at {uri} has everything\n"
        assert set(history(uri, run_id, "loss/train")) == set(range(1, 9))
        assert MlflowClient(uri).get_run(run_id).info.status == "FINISHED"


@pytest.mark.parametrize("hangs_first", [True, False])
def test_a_server_that_hangs_keeps_a_run_neither_from_starting_nor_from_being_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_first: bool
) -> None:
    monkeypatch.setattr(watch, "_FIRST_S", 1.0)
    (port,) = free_ports(1)
    uri = f"http://127.0.0.1:{port}"
    folder, config = run_folder(tmp_path, uri)
    mirror = MlflowMirror(folder, config)

    def suspend(processes: list[psutil.Process]) -> None:
        for one in processes:
            one.suspend()

    watcher = Watcher(folder, config, mirror)

    def stopped(processes: list[psutil.Process]) -> None:
        with watcher:
            suspend(processes)
            raise KeyboardInterrupt

    with server(tmp_path, port) as process:
        if not hangs_first:
            mirror.sync("RUNNING")
        hung = [process, *process.children(recursive=True)]
        if hangs_first:
            suspend(hung)
        since = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            stopped(hung)
        took_s = time.monotonic() - since
        for one in hung:
            one.resume()
        assert took_s < 5
        watcher._mirroring.join()
        late = MlflowMirror(folder, config)
        late.sync("KILLED")
        assert late.run_id is not None
        assert MlflowClient(uri).get_run(late.run_id).info.status == "KILLED"
