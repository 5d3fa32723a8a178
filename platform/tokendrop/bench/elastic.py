"""`tokendrop bench elastic`: what workers that follow the plan save and cost, beside a run of one size.

Nodes come and go, as on a cluster that is paid for; the plan is the planner's, from a profile that is measured first.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from tokendrop.bench.figures import bench_result, figure
from tokendrop.bench.nodes import Held, NodeMeter, held_now, node_seconds, node_start_s
from tokendrop.bench.picture import draw_run
from tokendrop.bench.profile import measure_profile
from tokendrop.bench.resizes import with_resizes
from tokendrop.config.load import dump, load_job
from tokendrop.launch import local_cluster
from tokendrop.launch.local_head import ClusterSize, LocalCluster
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import estimate
from tokendrop.track.journal import MetricsTail, read_steps
from tokendrop.track.run_folder import read_attempts

PAPER = Path("jobs/paper")
_MODELS = ("350m", "1.3b")
_HOURS_A_DAY = 24.0
_IDLE_TIMEOUT_S = 10.0  # as `tokendrop cluster up` has it
_ROUNDS = 5

Figures = dict[str, Any]
Say = Callable[[str], None]


def bench_elastic(
    job: Path,
    overrides: list[str],
    *,
    within: float,
    resizes: int,
    stretch: int,
    brief: bool,
    picture: Path | None,
    log: Say,
) -> dict[str, Any]:
    """Train on a local cluster: changing workers again and again; by plan and at one size; two trials at once.

    Args:
        within: times the hours of the run of one size that the run by plan may take.
        resizes: between one worker and the job's most.
        stretch: steps from one resize to the next; long enough for processes to start within it.
        brief: measure what the plan saves, and no more: of resizes the fast ones alone, and no two trials at once.
        picture: a file for a picture of the run by plan.
    Raises:
        UserError: the job is wrong, or a local cluster is up already.
    """
    most = load_job(job, overrides).scaling.most_workers
    figures = _predictions() if PAPER.is_dir() else {}  # which outside of a checkout there is not
    one_size = ["scaling.mode=fixed", "scaling.segments=[]", f"scaling.workers={most}"]
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as scratch:
        folders = [f"runs_folder={scratch}/runs", f"data.folder={scratch}/data", "track.uri=null"]
        config = load_job(job, [*overrides, *folders, *one_size])
        measured = measure_profile(config, name="measured", rounds=_ROUNDS, log=log)
        trials = _Trials(job, overrides, Path(scratch), log)
        with _cluster(most, standing=most) as cluster:
            turned, pauses = _turned(trials, cluster, resizes, stretch, most, brief)
        # so many nodes that two trials find a worker each beside the most that one may have
        with _cluster(most + 1, standing=0) as cluster:
            fixed, fixed_held = trials.metered(cluster, "one size", *one_size)
            profile = replace(with_resizes(measured, config.plan, turned), node_start_s=node_start_s(fixed_held))
            by_plan = planned(job, [*overrides, *folders], one_size, profile, Path(scratch) / "measured.yaml", within)
            followed, held = trials.metered(cluster, "by plan", *by_plan)
            if picture is not None:
                draw_run(followed, picture)
            two = {} if brief else _two_at_once(trials, cluster, by_plan, one_size)
        figures |= pauses | _predicted(load_job(job, [*overrides, *by_plan]).plan, config.plan, profile)
        figures |= _side_by_side(followed, fixed) | _billed(node_seconds(held), node_seconds(fixed_held))
        figures |= two
    options = [f"--within {within:g}", f"--resizes {resizes}", f"--stretch {stretch}", *["--brief"] * brief]
    return bench_result("elastic", figures, " ".join(["tokendrop bench elastic", f"--job {job}", *overrides, *options]))


def _turned(
    trials: "_Trials", cluster: LocalCluster, resizes: int, stretch: int, most: int, brief: bool
) -> tuple[Path, Figures]:
    """What changes of workers take, where the nodes for them are there; and the run of the fast ones."""
    trials.prepare(cluster)
    turns = [f"train.length={(resizes + 1) * stretch} steps", _turns(resizes, stretch, most)]
    fast = trials.run(cluster, "fast_resize", "scaling.mode=schedule", "scaling.fast_resize=true", *turns)
    if brief:
        return fast, _pauses("fast_resize", fast)
    turned = trials.run(cluster, "schedule", "scaling.mode=schedule", *turns)
    anew = trials.run(cluster, "fit_per_segment", "scaling.mode=fit_per_segment", *turns)
    return fast, _pauses("resize", turned) | _pauses("fast_resize", fast) | _pauses("restart", anew)


def _two_at_once(trials: "_Trials", cluster: LocalCluster, by_plan: list[str], one_size: list[str]) -> Figures:
    elastic = trials.two_at_once(cluster, "two by plan", *by_plan)
    alike = trials.two_at_once(cluster, "two of one size", *one_size)
    return {"two_trials_over_fixed": figure([elastic / alike], "x wall clock")}


def planned(
    job: Path, overrides: list[str], one_size: list[str], profile: DeviceProfile, file: Path, within: float
) -> list[str]:
    """Overrides by which the planner chooses the cheapest workers `within` so many times the hours of one size."""
    file.write_text(dump(profile), encoding="utf-8")
    fixed = load_job(job, [*overrides, *one_size])
    hours = within * estimate(fixed.plan, profile).wall_clock_s / 3600
    workers = [f"scaling.workers={fixed.scaling.workers}", f"scaling.max_workers={fixed.scaling.workers}"]
    return [
        "scaling.mode=schedule",
        "scaling.fast_resize=true",
        "scaling.segments=[]",
        f"scaling.profile={file}",
        *workers,
        f"scaling.deadline_hours={hours}",
    ]


@contextmanager
def _cluster(nodes: int, *, standing: int) -> Iterator[LocalCluster]:
    """A cluster of up to so many nodes of one core each, some of which are always there."""
    size = ClusterSize(
        min_nodes=standing, max_nodes=nodes, cpus_per_node=1, gpus_per_node=0, idle_timeout_s=_IDLE_TIMEOUT_S
    )
    cluster = local_cluster.start(size)
    try:
        yield cluster
    finally:
        local_cluster.stop()


@dataclass(frozen=True, slots=True)
class _Trials:
    """Runs of a job, each in a process of its own."""

    job: Path
    overrides: list[str]
    scratch: Path
    log: Say

    def prepare(self, cluster: LocalCluster) -> None:
        """Make the token shards."""
        self.log("run      prepare")
        with self._begin(cluster, "prepare", "prepare") as process:
            _finish(process)

    def metered(self, cluster: LocalCluster, name: str, *more: str) -> tuple[Path, list[Held]]:
        """Train to the end, and wait until all nodes have gone: the run folder, and the nodes that were held."""
        meter = NodeMeter(partial(held_now, cluster.nodes))
        with meter.running():
            run = self.run(cluster, name, *more)
        return run, meter.looks

    def run(self, cluster: LocalCluster, name: str, *more: str) -> Path:
        """Train to the end; returns the run folder."""
        self.log(f"run      {name}")
        with self._begin(cluster, "train", name, *more) as process:
            return Path(json.loads(_finish(process))["run"])

    def two_at_once(self, cluster: LocalCluster, name: str, *more: str) -> float:
        """Seconds until two trials that begin together are both done."""
        self.log(f"run      {name}")
        started = time.perf_counter()
        trials = [self._begin(cluster, "train", f"{name} {seed}", f"seed={seed}", *more) for seed in (1, 2)]
        finish_all(trials)
        return time.perf_counter() - started

    def _begin(self, cluster: LocalCluster, what: str, name: str, *more: str) -> subprocess.Popen[bytes]:
        folders = [f"runs_folder={self.scratch}/{name}", f"data.folder={self.scratch}/data", "track.uri=null"]
        command = [sys.executable, "-m", "tokendrop", what, str(self.job), *self.overrides, *folders, *more]
        # without the token of a Ray that this process would start
        environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
        environment |= cluster.environment
        return subprocess.Popen([*command, "--json"], env=environment, stdout=subprocess.PIPE)


def finish_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for commands that run at once; where one fails, whichever it is, the others are ended.

    Raises:
        CalledProcessError: one has failed.
    """
    with ThreadPoolExecutor(len(processes)) as threads:
        try:
            for done in as_completed([threads.submit(_finish, process) for process in processes]):
                done.result()
        finally:
            for process in processes:
                process.terminate()  # does nothing to one that has ended


def _finish(process: subprocess.Popen[bytes]) -> bytes:
    """What a command printed; raises CalledProcessError where it failed."""
    said, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return said


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


def _billed(ours: float, theirs: float) -> Figures:
    """Nodes, from when they are asked for until they have gone: lead, start and idle time included."""
    return {
        "node_seconds_over_fixed": figure([ours / theirs], "x"),
        "node_seconds": figure([ours], "node-s"),
        "fixed_node_seconds": figure([theirs], "node-s"),
    }


def _predicted(plan: RunPlan, fixed: RunPlan, profile: DeviceProfile) -> Figures:
    """By the profile that chose the plan."""
    ours, theirs = estimate(plan, profile), estimate(fixed, profile)
    return {
        "planned_worker_seconds_over_fixed": figure([ours.gpu_hours / theirs.gpu_hours], "x"),
        "planned_wall_clock_over_fixed": figure([ours.wall_clock_s / theirs.wall_clock_s], "x"),
        "planned_resizes": figure([len(plan.resizes)], "resizes"),
        "node_start_s": figure([profile.node_start_s or 0.0], "s"),
    }


def _predictions() -> Figures:
    """Of the paper's runs, on its cluster."""
    return {
        f"gpt3_{model}_{name}_gpu_days": figure([days], "GPU-days")
        for model in _MODELS
        for name, days in zip(("full_length", "random_ltd", "by_plan"), predicted_gpu_days(model), strict=True)
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
    hours = estimate(full.plan, profile).wall_clock_s / 3600
    by_plan = [*workers, "scaling.mode=schedule", f"scaling.deadline_hours={hours}"]
    dropping, followed = (load_job(PAPER / f"gpt3_{model}_ltd.yaml", keys) for keys in (workers, by_plan))
    first, second, third = (estimate(one.plan, profile).gpu_hours / _HOURS_A_DAY for one in (full, dropping, followed))
    return first, second, third
