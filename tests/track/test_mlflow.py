"""A run folder and its mirror in MLflow: real databases, a real server that comes late."""

import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from checkouts import free_ports
from servers import server
from tokendrop.cli.main import main
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import dump_job, load_job
from tokendrop.config.run import CheckpointConfig
from tokendrop.launch import watch
from tokendrop.launch.watch import Watcher
from tokendrop.track.decisions import DECISIONS, note_decision
from tokendrop.track.journal import Journal
from tokendrop.track.mlflow import METRICS, STATE, MlflowMirror
from tokendrop.track.parameters import parameters
from tokendrop.track.run_folder import DATA, ENVIRONMENT, JOB, PLAN
from tokendrop.train.adaptive import Decision
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


def run_folder(tmp_path: Path, uri: str, *overrides: str) -> tuple[Path, ExperimentConfig]:
    config = load_job(QUICKSTART, [f"track.uri={uri}", *overrides])
    folder = tmp_path / "quickstart-random-ltd-20260101-120000"
    folder.mkdir(parents=True)
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


def history(uri: str, run_id: str, metric: str) -> dict[int, float]:
    return {point.step: point.value for point in MlflowClient(uri).get_metric_history(run_id, metric)}


def test_a_run_restarted_is_one_mlflow_run_with_every_step(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    mirror = MlflowMirror(folder, config)
    train_on(folder, range(1, 9), commit=5)
    mirror.sync()
    train_on(folder, range(6, 13), commit=12)  # a restart from the checkpoint of step 5
    note_decision(folder, "schedule", Decision(step=6, kept_length=8, gap=0.1))
    MlflowMirror(folder, config).sync("FINISHED")

    client = MlflowClient(sqlite)
    experiment = client.get_experiment_by_name(config.track.experiment)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == MlflowMirror(folder, config).run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["drop.schedule.start"] == str(config.drop.schedule.start)
    assert run.data.tags["method"] == "random_ltd"
    sent = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert sent == {JOB, PLAN, ENVIRONMENT, DECISIONS}
    for name, field in METRICS.items():
        wanted = {step: getattr(report(step), field) for step in range(1, 13)}
        assert history(sqlite, run.info.run_id, name) == {s: v for s, v in wanted.items() if v is not None}
    assert history(sqlite, run.info.run_id, "quality/perplexity") == {5: math.exp(7.5), 10: math.exp(7.5)}


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
    assert client.get_run(late.run_id).data.params == parameters(config)
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


def runs_at(uri: str) -> list[Run]:
    client = MlflowClient(uri)
    return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))


def test_runs_of_one_name_in_two_folders_are_two_runs(tmp_path: Path, sqlite: str) -> None:
    for place in ("here", "there"):
        folder, config = run_folder(tmp_path / place, sqlite)
        MlflowMirror(folder, config).sync()
    assert {Path(run.data.tags["tokendrop.folder"]).parent.name for run in runs_at(sqlite)} == {"here", "there"}


DAMAGED = {
    "empty": b"",
    "torn": b'{"run_id": "x", "desc',
    "of another kind": b"[1]",
    "with another value": b'{"run_id": 5, "offset": "x"}',
    "with a negative offset": b'{"offset": -1}',
    "no text": b"\xff\x00",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_state_is_told_of_and_everything_is_sent_again_once(
    tmp_path: Path, sqlite: str, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    train_on(folder, range(1, 9), commit=8)
    first = MlflowMirror(folder, config)
    first.sync()
    train_on(folder, range(9, 13), commit=12)
    (folder / STATE).write_bytes(content)
    assert not caplog.records
    late = MlflowMirror(folder, replace(config, checkpoint=CheckpointConfig(keep=7)))  # as a resume may have it
    assert [record.message for record in caplog.records] == [
        f"mlflow   {folder / STATE} is damaged; MLflow is told everything again"
    ]
    late.sync("FINISHED")
    assert late.run_id == first.run_id is not None
    (run,) = runs_at(sqlite)
    assert run.info.status == "FINISHED"
    points = MlflowClient(sqlite).get_metric_history(late.run_id, "loss/train")
    assert sorted(point.step for point in points) == list(range(1, 13))


def test_a_perplexity_beyond_all_floats_is_recorded(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    journal = Journal(folder, rank=0, world_size=1, start=0)
    for step, loss in enumerate([709.0, 710.0, math.inf, math.nan], start=1):
        journal.record(replace(report(step), loss=loss, val_loss=loss), [step])
    journal.commit(4)
    mirror = MlflowMirror(folder, config)
    mirror.sync("FINISHED")
    assert mirror.run_id is not None
    told = history(sqlite, mirror.run_id, "quality/perplexity")
    assert told[1] == math.exp(709.0)
    assert told[2] == told[3] >= sys.float_info.max
    assert math.isnan(told[4])


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


@pytest.mark.parametrize("hangs_first", [pytest.param(True, marks=pytest.mark.long), False])
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
            if not hangs_first:
                watcher.wait_for_tracking()
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
        assert MlflowMirror(folder, config).state["status"] == "KILLED"  # for whoever sends the rest
        watcher._mirroring.join()
        late = MlflowMirror(folder, config)
        late.sync("KILLED")
        assert late.run_id is not None
        assert MlflowClient(uri).get_run(late.run_id).info.status == "KILLED"
