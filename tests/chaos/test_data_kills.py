"""Killed preparation and killed training: the same shards, the same losses, a clean ledger."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from folders import bytes_of
from tokendrop.config.load import load_job
from tokendrop.data.pipeline import prepare
from tokendrop.data.shards import MANIFEST, SHARDS
from tokendrop.launch.cluster import source_path
from tokendrop.launch.trainer import run_training
from tokendrop.track.journal import METRICS, read_steps

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(3600)]

LONGEST_WAIT_S = 240


def job_of(folder: Path) -> Path:
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
        train={"length": "600 steps", "global_batch": 8, "micro_batch": 4, "peak_lr": 1e-3, "precision": "fp64"},
        checkpoint={"every": "20 steps"},
        evaluate={"every": "100 steps", "sequences": 4},
        scaling={"cpus_per_worker": 1, "workers": 2, "max_restarts": 10_000},
    )


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """A command of its own process group, on the Ray of this session."""
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": source_path()}
    command = [sys.executable, "-m", "tokendrop", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)


def wait_until(what: Callable[[], bool], process: subprocess.Popen[bytes], name: str) -> bool:
    """Whether it came true before the process ended."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not what():
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr and process.stderr.read().decode()
            return False
        assert time.monotonic() < deadline, f"waited for {name} for {LONGEST_WAIT_S} s"
        time.sleep(0.01)
    return True


def lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def shards_in(folder: Path) -> int:
    return sum(len(lines(path)) for path in folder.glob(f"runs/data/*/{SHARDS}"))


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def prepared_in(folder: Path) -> Path:
    (manifest,) = folder.glob(f"runs/data/*/{MANIFEST}")
    return manifest.parent


def audit(run: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tokendrop", "data", "audit", str(run), "--json"],
        env={**os.environ, "PYTHONPATH": source_path()},
        capture_output=True,
        check=False,
    )
    return json.loads(done.stdout)


def test_killed_preparation_ends_with_the_bytes_of_one_that_was_not(tmp_path, kills, chance):
    expected = bytes_of(prepare(load_job(job_of(tmp_path / "whole"))))
    folder = tmp_path / "killed"
    job = job_of(folder)
    # the corpus lies elsewhere, and its names are in the manifest
    left = kills
    while left:
        goal = shards_in(folder) + chance.randint(0, 6)
        process = start("prepare", job)
        if not wait_until(lambda goal=goal: shards_in(folder) > goal, process, f"shard {goal}"):
            for path in folder.glob("runs/data/*/*"):  # done before it was killed: once more
                path.unlink()
            continue
        time.sleep(chance.uniform(0, 0.3))
        kill(process)
        left -= 1
    process = start("prepare", job)
    assert process.wait() == 0
    found = bytes_of(prepared_in(folder))
    assert expected.pop(MANIFEST) != found.pop(MANIFEST)
    assert found == expected


def last_step(run: Path) -> int:
    return max((json.loads(line).get("step", 0) for line in lines(run / METRICS) if line), default=0)


def worker_pid(run: Path) -> int:
    return [json.loads(line)["pid"] for line in lines(run / METRICS) if "attempt_from" in line][-1]


def test_killed_training_ends_with_the_losses_of_one_that_was_not_and_a_clean_ledger(tmp_path, kills, chance):
    job = job_of(tmp_path)
    runs = tmp_path / "killed"
    left, process = kills, start("train", job, f"runs_folder={runs}")
    assert wait_until(lambda: bool(list(runs.glob(f"*/{METRICS}"))), process, "the run")
    (run,) = (path.parent for path in runs.glob(f"*/{METRICS}"))
    while left:
        goal = last_step(run) + chance.randint(1, 40)
        if not wait_until(lambda goal=goal: last_step(run) >= goal, process, f"step {goal}"):
            break  # the run is over
        if chance.random() < 0.8:
            os.kill(worker_pid(run), signal.SIGKILL)
        else:
            kill(process)
            process = start("train", "--resume", run)
        left -= 1
    assert process.wait() == 0
    assert left < kills
    report = audit(run)
    assert (report["missing"], report["repeated"]) == (0, 0), report
    uninterrupted = Path(run_training(load_job(job, ["scaling.workers=1"]))["run"])
    losses = [[row["loss"] for row in read_steps(one)] for one in (run, uninterrupted)]
    np.testing.assert_allclose(*losses, rtol=1e-10)
