"""Killed preparation and killed training: the same shards, the same losses, a clean ledger."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from folders import bytes_of
from kills import Command, audited, last_step, lines, run_below, worker_pid
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.shards.format import MANIFEST, SHARDS
from tokendrop.launch.trainer import run_training
from tokendrop.track.journal import read_steps

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(3600)]


def job_of(folder: Path, steps: int = 600) -> Path:
    """Six files of a corpus; a run over half of it, which follows its preparation."""
    for number in range(6):
        path = folder / f"corpus/{number}.jsonl.zst"
        if not path.exists():
            write_corpus(path, documents(300, seed=number))
    return tiny_job(
        folder,
        [folder / "corpus"],
        data={
            "tokenizer": str(byte_tokenizer(folder / "tokenizer.json")),
            "rows_per_shard": 128,
            "shuffle_rows": 256,
            "test_share": 0.05,
        },
        train={"length": f"{steps} steps", "global_batch": 8, "micro_batch": 4, "peak_lr": 1e-3, "precision": "fp64"},
        checkpoint={"every": "20 steps"},
        evaluate={"every": "100 steps", "sequences": 4},
        scaling={"cpus_per_worker": 1, "workers": 2, "max_restarts": 10_000},
    )


def here() -> dict[str, str]:
    """The environment of processes on the Ray of this session."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def shards_in(folder: Path) -> int:
    return sum(len(lines(path)) for path in folder.glob(f"runs/data/*/{SHARDS}"))


def prepared_in(folder: Path) -> Path:
    (manifest,) = folder.glob(f"runs/data/*/{MANIFEST}")
    return manifest.parent


def test_killed_preparation_ends_with_the_bytes_of_one_that_was_not(tmp_path, kills, chance, tally):
    expected = bytes_of(prepare(load_job(job_of(tmp_path / "whole"))))
    folder = tmp_path / "killed"
    job = job_of(folder)
    # the corpus lies elsewhere, and its names are in the manifest
    left = kills
    while left:
        goal = shards_in(folder) + chance.randint(0, 6)
        process = Command("prepare", job, environment=here())
        if not process.until(lambda goal=goal: shards_in(folder) > goal, f"shard {goal}"):
            for path in folder.glob("runs/data/*/*"):  # done before it was killed: once more
                path.unlink()
            continue
        time.sleep(chance.uniform(0, 0.3))
        process.kill_all()
        tally["preparations"] += 1
        left -= 1
    Command("prepare", job, environment=here()).finish()
    found = bytes_of(prepared_in(folder))
    assert expected.pop(MANIFEST) != found.pop(MANIFEST)
    assert found == expected


def test_killed_training_ends_with_the_losses_of_one_that_was_not_and_a_clean_ledger(tmp_path, kills, chance, tally):
    job = job_of(tmp_path, steps=60 + 50 * kills)
    runs = tmp_path / "killed"
    process = Command("train", job, f"runs_folder={runs}", environment=here())
    run = run_below(runs, process)
    for _ in range(kills):
        goal = last_step(run) + chance.randint(1, 40)
        assert process.until(lambda goal=goal: last_step(run) >= goal, f"step {goal}"), "over before all was killed"
        if chance.random() < 0.8:
            os.kill(worker_pid(run), signal.SIGKILL)
            tally["workers"] += 1
        else:
            process.kill_all()
            tally["drivers"] += 1
            process = Command("train", "--resume", run, environment=here())
    process.finish()
    assert audited(run) == (0, 0)
    uninterrupted = Path(run_training(load_job(job, ["scaling.workers=1"]))["run"])
    losses = [[row["loss"] for row in read_steps(one)] for one in (run, uninterrupted)]
    np.testing.assert_allclose(*losses, rtol=1e-10)
