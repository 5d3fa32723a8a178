"""`tokendrop bench overhead`: tokens per second through the platform beside a bare loop on the same model."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokendrop.bench.figures import bench_result, figure, interleave, ratios
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.models.build import build_model
from tokendrop.train.device import autocast, pick_device, pick_dtype, tune_cpu
from tokendrop.train.optimizer import build_optimizer

_WARM_UP = 8  # until Ray has started all of its own processes


def bench_overhead(job: Path, *, steps: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train `steps` steps with everything on (Ray Train, data, checkpoints, MLflow), and in a bare loop.

    Each measurement is a process of its own, so that neither warms the other up; start-up and the first steps
    are left out of both.
    """
    overrides = [f"train.length={steps} steps", "checkpoint.every=50%", "evaluate.every=50%"]
    config = load_job(job, overrides)
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as scratch:
        cases = {
            "platform": lambda: _platform(job, overrides, Path(scratch), config),
            "bare": lambda: _bare(job, overrides),
        }
        speeds = interleave(cases, rounds=rounds, say=say)
    figures = {
        "platform_over_bare": figure(ratios(speeds["platform"], speeds["bare"]), "x tokens/s"),
        "platform_tokens_per_s": figure(speeds["platform"], "tokens/s"),
        "bare_tokens_per_s": figure(speeds["bare"], "tokens/s"),
    }
    return bench_result("overhead", figures, f"tokendrop bench overhead --job {job} --steps {steps} --rounds {rounds}")


def _platform(job: Path, overrides: list[str], scratch: Path, config: ExperimentConfig) -> float:
    from tokendrop.track.journal import read_steps

    folders = [f"runs_folder={scratch}/runs", f"data.folder={scratch}/data", f"track.uri=sqlite:///{scratch}/mlflow.db"]
    result = _json([sys.executable, "-m", "tokendrop", "train", str(job), *overrides, *folders, "--json"])
    steps = read_steps(Path(result["run"]))[_WARM_UP:]
    return len(steps) * config.tokens_per_step / sum(step["step_time_s"] for step in steps)


def _bare(job: Path, overrides: list[str]) -> float:
    return _json([sys.executable, "-m", "tokendrop.bench.overhead", str(job), *overrides])["tokens_per_s"]


def _json(command: list[str]) -> dict[str, Any]:
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def bare_loop(config: ExperimentConfig) -> float:
    """Tokens per second of the loop that one would write for one model on one device, on random tokens."""
    train, device = config.train, pick_device()
    tune_cpu(config.scaling.cpus_per_worker)
    dtype = pick_dtype(train.precision, device)
    model = build_model(config.model, seed=config.seed).to(device)
    optimizer = build_optimizer(model, train)
    tokens = torch.randint(
        config.model.vocab_size, (train.micro_batch, config.model.sequence_length + 1), device=device
    )
    accumulation = train.global_batch // train.micro_batch
    started = 0.0
    for step in range(config.steps):
        if step == _WARM_UP:
            started = time.perf_counter()
        loss = torch.zeros((), device=device)
        for _ in range(accumulation):
            with autocast(device, dtype):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    return (config.steps - _WARM_UP) * config.tokens_per_step / (time.perf_counter() - started)


if __name__ == "__main__":
    print(json.dumps({"tokens_per_s": bare_loop(load_job(sys.argv[1], sys.argv[2:]))}))
