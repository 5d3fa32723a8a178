"""Whole runs on a real Ray: world sizes, crashes and resumes must not show in what is trained."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.rows import sample_order
from tokendrop.data.shards import read_manifest
from tokendrop.launch.trainer import run_training
from tokendrop.track.journal import MetricsTail, read_ledger, read_steps, uncommitted_parts
from tokendrop.track.run_folder import CHECKPOINTS, open_run_folder
from tokendrop.train.checkpoint import committed, read_meta

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

FLOAT64 = 1e-10  # losses of runs that differ in nothing but the order of their sums

JOB = """
name: tiny
model: {kind: gpt, layers: 4, width: 32, heads: 2, sequence_length: 32, vocab_size: 512}
data: {corpus: [CORPUS], tokenizer_vocab_size: 300, validation_share: 0.2, rows_per_shard: 64}
train:
  length: 12 steps
  global_batch: 8
  micro_batch: 2
  peak_lr: 1.0e-3
  precision: fp64
  lr_clock: layer_token
drop: {method: random_ltd, schedule: {kind: linear, start: 8, until: 70%, increment: 4}}
scaling: {workers: 1, cpus_per_worker: 1, max_restarts: 1}
checkpoint: {every: 3 steps}
evaluate: {every: 6 steps, sequences: 8}
track: {uri: null}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    words = np.random.default_rng(0).integers(0, 50, size=(200, 40))
    text = "\n".join(f'{{"text": "{" ".join(f"word{w}" for w in line)}"}}' for line in words)
    (tmp_path / "corpus.jsonl").write_text(text)
    path = tmp_path / "tiny.yaml"
    path.write_text(JOB.replace("CORPUS", str(tmp_path / "corpus.jsonl")))
    return path


def config_of(job: Path, *overrides: str) -> ExperimentConfig:
    folders = [f"runs_folder={job.parent}/runs", f"data.folder={job.parent}/data"]
    return load_job(job, [*folders, *overrides])


def trained(job: Path, *overrides: str) -> Path:
    return Path(run_training(config_of(job, *overrides))["run"])


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_steps(run)]


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


def test_world_size_does_not_show_in_samples_or_losses(job: Path) -> None:
    alone = trained(job)
    for workers in (2, 4):
        together = trained(job, f"scaling.workers={workers}")
        np.testing.assert_allclose(losses(together), losses(alone), rtol=FLOAT64)
        assert {row["world_size"] for row in read_ledger(together)} == {workers}
        assert_ledger_is_exact(together)
    assert_ledger_is_exact(alone)


def test_rows_streamed_by_ray_data_are_the_rows_mapped_from_shards(job: Path) -> None:
    mapped, streamed = trained(job), trained(job, "data.reader=ray_data", "scaling.workers=2")
    np.testing.assert_allclose(losses(streamed), losses(mapped), rtol=FLOAT64)
    assert_ledger_is_exact(streamed)


def kill_at(runs: Path, step: int, victims: list[int]) -> None:
    """SIGKILL rank 0 of the run below `runs` as soon as it has done `step`."""
    while not list(runs.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    tail = MetricsTail(next(runs.glob("*/metrics.jsonl")).parent)
    pid = 0
    while True:
        for line in tail.read():
            pid = line.get("pid", pid)
            if line.get("step", 0) >= step:
                os.kill(pid, signal.SIGKILL)
                victims.append(pid)
                return
        time.sleep(0.02)


def test_a_killed_worker_costs_no_sample_and_changes_no_loss(job: Path) -> None:
    # long enough for the live record to be flushed, and seen, before the run is over
    longer = ("train.length=400 steps", "checkpoint.every=40 steps")
    uninterrupted = losses(trained(job, *longer))
    victims: list[int] = []
    runs = job.parent / "killed"
    killer = threading.Thread(target=kill_at, args=(runs, 50, victims))
    killer.start()
    result = run_training(config_of(job, *longer, "scaling.workers=2", f"runs_folder={runs}"))
    killer.join()
    assert len(victims) == 1
    assert result["restarts"] == 1
    np.testing.assert_allclose(losses(Path(result["run"])), uninterrupted, rtol=FLOAT64)
    assert_ledger_is_exact(Path(result["run"]))


def test_a_run_goes_on_where_it_stopped_at_another_world_size(job: Path) -> None:
    whole = trained(job, "checkpoint.keep=9")
    forget_after(whole, step=6)
    before = losses(whole)
    result = run_training(config_of(job, "scaling.workers=2", "data.reader=ray_data"), resume=whole)
    assert result["steps"] == 12
    assert result["resizes"] == 1
    np.testing.assert_allclose(losses(whole), before, rtol=FLOAT64)
    assert_ledger_is_exact(whole)


def forget_after(run: Path, step: int) -> None:
    """Leave a run as a driver leaves it that dies after writing its record, before committing later checkpoints."""
    for checkpoint in committed(run / CHECKPOINTS):
        if read_meta(checkpoint)["step"] > step:
            checkpoint.rename(checkpoint.with_suffix(".partial"))
    assert list(uncommitted_parts(run, step))
