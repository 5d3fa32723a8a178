"""`tokendrop bench elastic`: what workers that follow the plan save and cost, beside a run of one size."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from tokendrop.bench.figures import bench_result, figure
from tokendrop.bench.picture import draw_run
from tokendrop.config.load import load_job
from tokendrop.launch import local_cluster
from tokendrop.launch.local_head import ClusterSize
from tokendrop.schedule.scaling import estimate
from tokendrop.track.journal import MetricsTail, read_steps
from tokendrop.track.run_folder import read_attempts

PAPER = Path("jobs/paper")
_MODELS = ("350m", "1.3b")
_HOURS_A_DAY = 24.0

Figures = dict[str, Any]
Say = Callable[[str], None]


def bench_elastic(
    job: Path, overrides: list[str], *, resizes: int, stretch: int, picture: Path | None, say: Say
) -> dict[str, Any]:
    """Train on a local cluster: by plan and at one size; two trials at once; changing workers again and again.

    Args:
        resizes: between one worker and the job's most.
        stretch: steps from one resize to the next; long enough for processes to start meanwhile.
        picture: a file for a picture of the run by plan.
    Raises:
        UserError: the job is wrong, or a local cluster is up already.
    """
    most = load_job(job, overrides).scaling.most_workers
    figures: Figures = {}
    for model in _MODELS:
        for name, days in zip(("full_length", "random_ltd", "by_plan"), predicted_gpu_days(model), strict=True):
            figures[f"gpt3_{model}_{name}_gpu_days"] = figure([days], "GPU-days")
    one_size = ["scaling.mode=fixed", "scaling.segments=[]", f"scaling.workers={most}"]
    turns = [f"train.length={(resizes + 1) * stretch} steps", _turns(resizes, stretch, most)]
    # so many nodes that two trials find a worker each beside the most that one may have
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as scratch, _cluster(most + 1) as environment:
        trials = _Trials(job, overrides, Path(scratch), environment, say)
        followed = trials.run("by plan")
        if picture is not None:
            draw_run(followed, picture)
        figures |= _side_by_side(followed, trials.run("one size", *one_size))
        elastic, fixed = trials.two_at_once("two by plan"), trials.two_at_once("two of one size", *one_size)
        figures["two_trials_over_fixed"] = figure([elastic / fixed], "x wall clock")
        for mode, key in (("schedule", "resize"), ("fit_per_segment", "restart")):
            figures |= _pauses(key, trials.run(mode, f"scaling.mode={mode}", *turns))
    command = ["tokendrop bench elastic", f"--job {job}", *overrides, f"--resizes {resizes}", f"--stretch {stretch}"]
    return bench_result("elastic", figures, " ".join(command))


@contextmanager
def _cluster(nodes: int) -> Iterator[dict[str, str]]:
    """The environment of processes on a cluster of nodes of one core each, none of which come or go."""
    size = ClusterSize(min_nodes=nodes, max_nodes=nodes, cpus_per_node=1, gpus_per_node=0, idle_timeout_s=3600)
    cluster = local_cluster.start(size)
    try:
        yield {**os.environ, **cluster.environment}
    finally:
        local_cluster.stop()


@dataclass(frozen=True, slots=True)
class _Trials:
    """Runs of a job, each in a process of its own."""

    job: Path
    overrides: list[str]
    scratch: Path
    environment: Mapping[str, str]
    say: Say

    def run(self, name: str, *more: str) -> Path:
        """Train to the end; returns the run folder."""
        self.say(f"run      {name}")
        with self._begin(name, *more) as process:
            said, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        return Path(json.loads(said)["run"])

    def two_at_once(self, name: str, *more: str) -> float:
        """Seconds until two trials that begin together are both done."""
        self.say(f"run      {name}")
        started = time.perf_counter()
        trials = [self._begin(f"{name} {seed}", f"seed={seed}", *more) for seed in (1, 2)]
        codes = [trial.wait() for trial in trials]
        if any(codes):
            raise subprocess.CalledProcessError(max(codes), trials[0].args)
        return time.perf_counter() - started

    def _begin(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        folders = [f"runs_folder={self.scratch}/{name}", f"data.folder={self.scratch}/data", "track.uri=null"]
        command = [sys.executable, "-m", "tokendrop", "train", str(self.job), *self.overrides, *folders, *more]
        return subprocess.Popen([*command, "--json"], env=self.environment, stdout=subprocess.PIPE)


def _turns(resizes: int, stretch: int, most: int) -> str:
    sizes = [
        f"{{from: {number * stretch} steps, workers: {most if number % 2 else 1}}}" for number in range(resizes + 1)
    ]
    return f"scaling.segments=[{', '.join(sizes)}]"


def _side_by_side(followed: Path, fixed: Path) -> Figures:
    ours, theirs = worker_seconds(followed), worker_seconds(fixed)
    ends = [read_steps(run)[-1] for run in (followed, fixed)]
    _, pauses = read_attempts(followed)
    return {
        "worker_seconds_over_fixed": figure([ours / theirs], "x"),
        "worker_seconds": figure([ours], "worker-s"),
        "fixed_worker_seconds": figure([theirs], "worker-s"),
        "wall_clock_over_fixed": figure([_wall_clock_s(followed) / _wall_clock_s(fixed)], "x"),
        "layer_tokens_over_fixed": figure([ends[0]["layer_tokens"] / ends[1]["layer_tokens"]], "x"),
        "val_loss_minus_fixed": figure([ends[0]["val_loss"] - ends[1]["val_loss"]], "nats"),
        "pauses_total_s": figure([sum(one["pause_s"] for one in pauses)], "s"),
    }


def worker_seconds(run: Path) -> float:
    """Seconds of a run's steps and pauses, each times the workers that were held for it."""
    _, pauses = read_attempts(run)
    steps = sum(row["step_time_s"] * row["world_size"] for row in read_steps(run))
    return steps + sum(one["pause_s"] * max(one["from"], one["to"]) for one in pauses)


def _wall_clock_s(run: Path) -> float:
    return sum(row["step_time_s"] for row in read_steps(run)) + sum(one["pause_s"] for one in read_attempts(run)[1])


def _pauses(key: str, run: Path) -> Figures:
    """From the last step before a change of workers to the first one after it."""
    _, pauses = read_attempts(run)
    seconds = [one["pause_s"] for one in pauses]
    done = [line["step"] for line in MetricsTail(run).read(limit=-1) if "step" in line]
    return {
        f"{key}_pause_s": figure(seconds, "s"),
        f"{key}_pause_p95_s": figure([quantiles(seconds, n=20, method="inclusive")[-1]], "s"),
        f"{key}_steps_redone": figure([len(done) - len(set(done))], "steps"),
    }


def predicted_gpu_days(model: str) -> tuple[float, float, float]:
    """On 64 A100-40G: full length, random-LTD, and random-LTD by a plan that takes full length's time."""
    workers = ["scaling.profile=a100-40g-8", "scaling.workers=64"]
    full = load_job(PAPER / f"gpt3_{model}_baseline.yaml", workers)
    profile = full.scaling.profile
    assert profile is not None
    hours = estimate(full.plan(), profile).wall_clock_s / 3600
    by_plan = [*workers, "scaling.mode=schedule", f"scaling.deadline_hours={hours}"]
    dropping, followed = (load_job(PAPER / f"gpt3_{model}_ltd.yaml", keys) for keys in (workers, by_plan))
    first, second, third = (
        estimate(one.plan(), profile).gpu_hours / _HOURS_A_DAY for one in (full, dropping, followed)
    )
    return first, second, third
