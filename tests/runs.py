"""Small runs in float64, in whose losses any difference shows."""

import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.track.journal import MetricsTail, read_steps
from tokendrop.track.run_folder import describe_run
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS
from tokendrop.train.worker import build_engine

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
scaling: {cpus_per_worker: 1, max_restarts: 1, patience_s: 2}
checkpoint: {every: 3 steps}
evaluate: {every: 6 steps, sequences: 8}
track: {uri: null}
"""


def write_job(folder: Path) -> Path:
    """The job, and its corpus beside it."""
    words = np.random.default_rng(0).integers(0, 50, size=(200, 40))
    text = "\n".join(f'{{"text": "{" ".join(f"word{w}" for w in line)}"}}' for line in words)
    (folder / "corpus.jsonl").write_text(text)
    job = folder / "tiny.yaml"
    job.write_text(JOB.replace("CORPUS", str(folder / "corpus.jsonl")))
    return job


def config_of(job: Path, *overrides: str) -> ExperimentConfig:
    """With runs and token shards below the job's folder."""
    return load_job(job, [f"runs_folder={job.parent}/runs", f"data.folder={job.parent}/data", *overrides])


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_steps(run)]


def begin(folder: Path, config: ExperimentConfig, *, step: int = 4) -> Path:
    """The folder of a run of the job, with one checkpoint; without one at step 0."""
    run, data = folder / "run", folder / "data"
    run.mkdir()
    data.mkdir()
    (data / "tokenizer.json").write_text("{}")
    describe_run(run, config, data)
    if step:
        engine, _ = build_engine(config, torch.device("cpu"))
        checkpoints = Checkpoints(run / CHECKPOINTS, keep=1, meta={"model": asdict(config.model), "name": config.name})
        checkpoints.save(engine, step)
        checkpoints.wait()
    return run


def kill_at(runs: Path, step: int) -> None:
    """SIGKILL rank 0 of the run below `runs` as soon as it has done `step`."""
    while not (found := list(runs.glob("*/metrics.jsonl"))):
        time.sleep(0.02)
    tail, pid = MetricsTail(found[0].parent), 0
    while True:
        for line in tail.read():
            pid = line.get("pid", pid)
            if line.get("step", 0) >= step:
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.02)


def left_behind(folder: Path) -> list[str]:
    """Everything below `folder`/runs but token shards, which the next attempt goes on with."""
    data = folder / "runs" / "data"
    return [str(path) for path in (folder / "runs").rglob("*") if path != data and data not in path.parents]
