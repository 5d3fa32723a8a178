"""Whole runs on a real Ray: world sizes, crashes and resumes must not show in what is trained."""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.in_ray import UnluckyTorchConfig

from mutations import flip_bit
from runs import FLOAT64, config_of, kill_at, losses, write_job
from tokendrop.atomic import LOCK, exclusive_lock
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.read.row_reader import Rows, sample_order
from tokendrop.data.shards.files import map_shard
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError
from tokendrop.launch import trainer, watch
from tokendrop.launch.train_loop import fit_in_this_process
from tokendrop.launch.trainer import Fit, run_training
from tokendrop.track.audit import audit
from tokendrop.track.journal import MetricsTail, read_ledger, uncommitted_parts
from tokendrop.track.mlflow import MlflowMirror, Status
from tokendrop.track.run_folder import open_run_folder, read_attempts
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, read_meta
from tokendrop.train.trace_summary import read_summary

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a corpus, whose token shards the runs share."""
    return write_job(tmp_path_factory.mktemp("training"))


def trained(job: Path, *overrides: str) -> Path:
    return Path(run_training(config_of(job, *overrides))["run"])


@pytest.fixture(scope="module")
def alone(job: Path, ray_cluster: None) -> Path:
    """The run of one worker that reads mapped shards; all of its checkpoints are there."""
    return trained(job, "checkpoint.keep=9")


def assert_ledger_is_exact(run: Path) -> None:
    """Every sample of every step once, and just those that the order asks for."""
    config, data = open_run_folder(run)
    committed = read_manifest(data).committed("train")
    order = sample_order(config.data, seed=config.seed)
    batch = config.train.global_batch
    by_step: dict[int, list[int]] = {}
    for row in read_ledger(run):
        by_step.setdefault(row["step"], []).extend(row["sample_ids"])
    assert sorted(by_step) == list(range(1, config.steps + 1))
    for step, trained_on in by_step.items():
        positions = np.arange((step - 1) * batch, step * batch)
        assert sorted(trained_on) == sorted(order.sample_ids(positions, committed).tolist())


def test_world_size_does_not_show_in_samples_or_losses(job: Path, alone: Path) -> None:
    together = trained(job, "scaling.workers=4", "train.profile.steps=2..3")
    np.testing.assert_allclose(losses(together), losses(alone), rtol=FLOAT64)
    for run, workers in ((alone, 1), (together, 4)):
        assert {row["world_size"] for row in read_ledger(run)} == {workers}
        assert_ledger_is_exact(run)
    traced = read_summary(together)
    assert traced is not None
    assert (traced["first_step"], traced["last_step"], traced["world_size"]) == (2, 3, 4)


@pytest.mark.long
def test_rows_streamed_by_ray_data_are_the_rows_mapped_from_shards(job: Path, alone: Path) -> None:
    streamed = trained(job, "data.reader=ray_data", "scaling.workers=4")  # which hold all cores of the cluster
    np.testing.assert_allclose(losses(streamed), losses(alone), rtol=FLOAT64)
    assert_ledger_is_exact(streamed)


def test_a_killed_worker_costs_no_sample_and_changes_no_loss(job: Path) -> None:
    # long enough for the live record to be flushed, and seen, before the run is over
    longer = ("train.length=200 steps", "checkpoint.every=40 steps", "evaluate.every=100 steps")
    uninterrupted = losses(trained(job, *longer))
    runs = job.parent / "killed"
    killer = threading.Thread(target=kill_at, args=(runs, 50))
    killer.start()
    result = run_training(config_of(job, *longer, "scaling.workers=2", f"runs_folder={runs}"))
    killer.join()
    assert result["restarts"] == 1
    np.testing.assert_allclose(losses(Path(result["run"])), uninterrupted, rtol=FLOAT64)
    assert_ledger_is_exact(Path(result["run"]))


@pytest.mark.long
def test_workers_that_are_killed_as_they_start_are_started_again(
    job: Path, alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unlucky(**settings: Any) -> UnluckyTorchConfig:
        config = UnluckyTorchConfig(backend="gloo", timeout_s=20)
        config.moments = tmp_path
        return config

    monkeypatch.setattr(trainer, "torch_config", unlucky)
    result = run_training(config_of(job, "scaling.workers=4", "scaling.max_restarts=0", "run=unlucky"))
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}
    assert (result["steps"], result["restarts"]) == (12, 0)
    np.testing.assert_allclose(losses(Path(result["run"])), losses(alone), rtol=FLOAT64)


@pytest.mark.long
def test_a_row_that_is_damaged_ends_the_run_of_all_workers(job: Path) -> None:
    overrides = ("scaling.workers=2", f"data.folder={job.parent}/damaged", "run=damaged")
    config = config_of(job, *overrides)
    data = prepare(config)
    rows = Rows(data, "train")
    one = np.array([4 * config.train.global_batch])  # the position of a sample of the fifth step
    sample = sample_order(config.data, seed=config.seed).sample_ids(one, rows.committed)
    ((first,), (row,)) = rows.places(sample)
    shard = rows.shard_at(first)
    path = data / shard.file
    content, wanted = path.read_bytes(), map_shard(path, (shard.rows, rows.manifest.header.row_length))
    written = wanted[0][row].tobytes()
    assert content.count(written) == 1
    path.write_bytes(content.replace(written, written[::-1]))
    with pytest.raises(UserError, match=rf"{path}: damaged \(row {row} has changed\); remove"):
        run_training(config)
    assert len(read_attempts(job.parent / "runs" / "damaged")[0]) == 1  # it was not tried again


def test_a_run_goes_on_where_it_stopped_at_another_world_size(job: Path, alone: Path) -> None:
    stopped = shutil.copytree(alone, job.parent / "stopped")
    forget_after(stopped, step=6)
    result = run_training(config_of(job, "scaling.workers=2", "data.reader=ray_data"), resume=stopped)
    assert (result["run"], result["steps"], result["resizes"]) == (str(stopped), 12, 1)
    np.testing.assert_allclose(losses(stopped), losses(alone), rtol=FLOAT64)
    assert_ledger_is_exact(stopped)


@pytest.mark.parametrize("reader", ["memory_map", pytest.param("ray_data", marks=pytest.mark.long)])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(job: Path, alone: Path, capfd, reader: str) -> None:
    """Driver, streams of samples and workers come to the same one, and the steps in between are done again."""
    damaged = shutil.copytree(alone, job.parent / f"damaged_{reader}")
    forget_after(damaged, step=9)
    newest = committed(damaged / CHECKPOINTS)[-1]
    flip_bit(newest / "__0_0.distcp", 0.5)
    changes = ("scaling.workers=2", "scaling.max_restarts=0", f"data.reader={reader}")
    result = run_training(config_of(job, *changes), resume=damaged)
    assert (result["steps"], result["restarts"]) == (12, 1)
    assert read_attempts(damaged)[0][-1]["attempt_from"] == 6
    np.testing.assert_allclose(losses(damaged), losses(alone), rtol=FLOAT64)
    assert_ledger_is_exact(damaged)
    assert audit(damaged).is_clean
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note     ") and "counts" in line]
    assert said == [
        f"note     {newest}/__0_0.distcp: damaged; its checksum is not the one in meta.json; "
        "step_000000006 counts in its place"
    ]


@pytest.mark.long
def test_a_job_that_names_its_run_begins_it_once_and_goes_on_with_it_after(job: Path, alone: Path) -> None:
    named = trained(job, "run=mine", "checkpoint.keep=9")
    assert named == job.parent / "runs" / "mine"
    forget_after(named, step=6)
    assert trained(job, "run=mine") == named
    np.testing.assert_allclose(losses(named), losses(alone), rtol=FLOAT64)
    assert_ledger_is_exact(named)


def test_a_second_driver_is_kept_from_the_run_of_the_first(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_LEAVING_S", 0.0)
    run = job.parent / "runs" / "twice"
    with exclusive_lock(run), pytest.raises(UserError, match=f"^{run}: another process is at work on it; want "):
        trained(job, "run=twice")
    assert [path.name for path in run.iterdir()] == [LOCK]


@pytest.mark.parametrize(
    ("fit", "patience_s", "is_first"), [(None, 120.0, True), (fit_in_this_process, 3.0, False)], ids=["Ray", "here"]
)
def test_workers_start_while_mlflow_is_told_of_the_run_unless_they_are_this_process(
    job: Path, monkeypatch: pytest.MonkeyPatch, fit: Fit | None, patience_s: float, is_first: bool
) -> None:
    sync, seen = MlflowMirror.sync, list[bool]()

    def late(mirror: MlflowMirror, status: Status | None = None) -> None:
        deadline = time.monotonic() + patience_s
        while not seen and not steps_in(mirror.folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        seen.append(steps_in(mirror.folder))
        sync(mirror, status)

    monkeypatch.setattr(watch, "_FIRST_S", 2 * patience_s)
    monkeypatch.setattr(MlflowMirror, "sync", late)
    uri = f"track.uri=sqlite:///{job.parent}/mlflow.db"
    result = run_training(config_of(job, "scaling.workers=1", "train.length=4 steps", uri), fit=fit)
    assert seen[0] == is_first
    assert result["mlflow_run_id"] is not None


def steps_in(run: Path) -> bool:
    return any("step" in line for line in MetricsTail(run).read())


def forget_after(run: Path, step: int) -> None:
    """Leave a run as a driver leaves it that dies after writing its record, before committing later checkpoints."""
    for checkpoint in committed(run / CHECKPOINTS):
        if read_meta(checkpoint)["step"] > step:
            checkpoint.rename(checkpoint.with_suffix(".partial"))
    assert list(uncommitted_parts(run, step))
