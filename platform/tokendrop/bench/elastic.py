"""`tokendrop bench elastic`: what workers that follow the plan save and cost, beside a run of one size."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

from tokendrop.bench.figures import bench_result, figure
from tokendrop.config.load import load_job
from tokendrop.schedule.scaling import estimate
from tokendrop.track.journal import MetricsTail, read_steps
from tokendrop.track.run_folder import read_attempts

PAPER = Path("jobs/paper")
_MODELS = ("350m", "1.3b")
_DAY_H = 24.0

Figures = dict[str, Any]
Say = Callable[[str], None]


def bench_elastic(job: Path, overrides: list[str], *, resizes: int, stretch: int, say: Say) -> dict[str, Any]:
    """Train a job by its plan of workers and at its largest size; then change workers again and again, in both modes.

    Args:
        resizes: between one worker and the job's most.
        stretch: steps from one resize to the next; long enough for processes to start meanwhile.
    Raises:
        UserError: the job is wrong.
    """
    most = load_job(job, overrides).scaling.most_workers
    predicted = {name: found for model in _MODELS for name, found in _prediction(model).items()}
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as scratch:

        def run(name: str, *more: str) -> Path:
            folders = [f"runs_folder={scratch}/{name}", f"data.folder={scratch}/data", "track.uri=null"]
            command = [sys.executable, "-m", "tokendrop", "train", str(job), *overrides, *folders, *more, "--json"]
            say(f"run      {name}")
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            return Path(found["run"])

        followed = run("by plan")
        fixed = run("one size", "scaling.mode=fixed", "scaling.segments=[]", f"scaling.workers={most}")
        figures = _side_by_side(followed, fixed)
        turns = [f"train.length={(resizes + 1) * stretch} steps", _turns(resizes, stretch, most)]
        for mode, key in (("schedule", "resize"), ("fit_per_segment", "restart")):
            figures |= _pauses(key, run(mode, f"scaling.mode={mode}", *turns))
    command = ["tokendrop bench elastic", f"--job {job}", *overrides, f"--resizes {resizes}", f"--stretch {stretch}"]
    return bench_result("elastic", figures | predicted, " ".join(command))


def _turns(resizes: int, stretch: int, most: int) -> str:
    sizes = [
        f"{{from: {number * stretch} steps, workers: {most if number % 2 else 1}}}" for number in range(resizes + 1)
    ]
    return f"scaling.segments=[{', '.join(sizes)}]"


def _side_by_side(followed: Path, fixed: Path) -> Figures:
    ours, theirs = worker_seconds(followed), worker_seconds(fixed)
    losses = [read_steps(run)[-1]["val_loss"] for run in (followed, fixed)]
    tokens = [read_steps(run)[-1]["layer_tokens"] for run in (followed, fixed)]
    _, pauses = read_attempts(followed)
    return {
        "worker_seconds_over_fixed": figure([ours / theirs], "x"),
        "worker_seconds": figure([ours], "worker-s"),
        "fixed_worker_seconds": figure([theirs], "worker-s"),
        "layer_tokens_over_fixed": figure([tokens[0] / tokens[1]], "x"),
        "val_loss_minus_fixed": figure([losses[0] - losses[1]], "nats"),
        "pauses_total_s": figure([sum(one["pause_s"] for one in pauses)], "s"),
    }


def worker_seconds(run: Path) -> float:
    """Seconds of its steps and pauses, each times the workers that were held for them."""
    _, pauses = read_attempts(run)
    steps = sum(row["step_time_s"] * row["world_size"] for row in read_steps(run))
    return steps + sum(one["pause_s"] * max(one["from"], one["to"]) for one in pauses)


def _pauses(key: str, run: Path) -> Figures:
    """From the last step before a change of workers to the first step after it."""
    _, pauses = read_attempts(run)
    seconds = [one["pause_s"] for one in pauses]
    done = [line["step"] for line in MetricsTail(run).read(limit=-1) if "step" in line]
    return {
        f"{key}_pause_s": figure(seconds, "s"),
        f"{key}_pause_p95_s": figure([quantiles(seconds, n=20, method="inclusive")[-1]], "s"),
        f"{key}_steps_redone": figure([len(done) - len(set(done))], "steps"),
    }


def _prediction(model: str) -> Figures:
    """GPU-days on 64 A100-40G: full length, random-LTD, and random-LTD by a plan that takes full length's time."""
    profile = ["scaling.profile=a100-40g-8", "scaling.workers=64"]
    full = load_job(PAPER / f"gpt3_{model}_baseline.yaml", profile)
    assert full.scaling.profile is not None
    plans = [full.plan(), load_job(PAPER / f"gpt3_{model}_ltd.yaml", profile).plan()]
    hours = estimate(plans[0], full.scaling.profile).wall_clock_s / 3600
    by_plan = ["scaling.mode=schedule", f"scaling.deadline_hours={hours}"]
    plans.append(load_job(PAPER / f"gpt3_{model}_ltd.yaml", [*profile, *by_plan]).plan())
    days = [estimate(plan, full.scaling.profile).gpu_hours / _DAY_H for plan in plans]
    names = ("full_length", "random_ltd", "by_plan")
    return {
        f"gpt3_{model}_{name}_gpu_days": figure([value], "GPU-days") for name, value in zip(names, days, strict=True)
    }
