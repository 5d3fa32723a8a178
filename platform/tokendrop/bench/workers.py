"""`tokendrop bench workers`: what the platform's own classes take for very many workers, none of which is there.

The real classes are given what so many workers would give them, in one process. What Ray, torch's collectives and
networks take is not in the figures.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import ray.train
from torch.distributed.checkpoint.metadata import Metadata

from tokendrop.bench.fake_workers import FakeCluster, Gathered, fake_parts, fake_state, write_shards
from tokendrop.bench.figures import bench_result, figure
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.read.row_reader import sample_order
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.elastic.decide import ScalingDecider
from tokendrop.elastic.progress import Progress
from tokendrop.launch.follow import Follower
from tokendrop.schedule.scaling import ScalingObjective, choose_sizes, estimate, legal_sizes, with_workers
from tokendrop.track.audit import audit
from tokendrop.track.decisions import DecidedJob
from tokendrop.track.journal import LEDGER, METRICS, STEPS, Journal, MetricsTail
from tokendrop.track.prometheus import RankTimes
from tokendrop.track.run_folder import describe_run
from tokendrop.track.run_metrics import RunMetrics
from tokendrop.train.checkpoint_index import CHECKPOINTS, check_complete, step_name, write_meta
from tokendrop.train.report import StepReport
from tokendrop.train.storage import INDEX, CheckpointWriter, read_index

_PROFILE = "a100-40g-8"
_COMMITS, _POLLS, _TRIES = 10, 1000, 3
_LEAST_BATCH = 512  # sequences: the paper's own
_LATER = 1.2  # times the hours of the quickest plan, that the cheapest one may take

Figures = dict[str, Any]
Say = Callable[[str], None]


def bench_workers(job: Path, overrides: list[str], *, workers: int, steps: int, log: Say) -> dict[str, Any]:
    """Feed the platform's classes with the state of so many workers.

    Args:
        job: one for which a profile can choose the workers; its global batch becomes one that they share evenly,
            a sequence each at least.
        workers: an even number of them.
        steps: that are recorded, in ten parts with a commit each.
    Raises:
        UserError: the job is wrong.
    """
    batch = workers * -(-_LEAST_BATCH // workers)
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as scratch:
        folder = Path(scratch)
        config = _planned(job, overrides, workers, batch, folder)
        log("run      choose workers")
        figures = _choices(config, workers)
        write_shards(folder / "data", config)
        log("run      decide")
        figures |= _decisions(config, folder / "decided", workers)
        log("run      record")
        figures |= _record(config, folder / "recorded", workers, steps)
        for strategy in ("ddp", "fsdp"):
            log(f"run      checkpoint of {strategy}")
            figures |= _checkpoint(config, folder / strategy, workers, strategy)
    command = ["tokendrop bench workers", f"--job {job}", *overrides, f"--workers {workers}", f"--steps {steps}"]
    return bench_result("workers", figures, " ".join(command))


def _planned(job: Path, overrides: list[str], workers: int, batch: int, scratch: Path) -> ExperimentConfig:
    """The job with nine changes of workers in its plan."""
    turns = ", ".join(f"{{from: {10 * tenth}%, workers: {_size(tenth, workers)}}}" for tenth in range(10))
    share = ["train.micro_batch=1", f"train.global_batch={batch}", f"scaling.workers={workers}"]
    by_plan = ["scaling.mode=schedule", f"scaling.segments=[{turns}]", f"scaling.profile={_PROFILE}"]
    folders = [f"runs_folder={scratch}/runs", f"data.folder={scratch}/data", "track.uri=null"]
    return load_job(job, [*overrides, *folders, *share, *by_plan], to_run=False)


def _choices(config: ExperimentConfig, workers: int) -> Figures:
    """What it takes to choose other workers by a profile."""
    plan, profile = config.plan, config.scaling.profile
    assert profile is not None
    any_size = ScalingObjective(min_workers=1, max_workers=workers, minimise="time")
    quickest = with_workers(plan, choose_sizes(plan, profile, any_size))
    limit = _LATER * estimate(quickest, profile).wall_clock_s / 3600
    figures: Figures = {}
    for name, objective in (
        ("quickest", any_size),
        ("cheapest", replace(any_size, minimise="cost")),
        ("cheapest_in_time", replace(any_size, minimise="cost", limit=limit)),
    ):
        took = [seconds(partial(choose_sizes.__wrapped__, plan, profile, objective)) for _ in range(_TRIES)]
        figures[f"choose_sizes_{name}_s"] = figure(took, "s")
    return figures


def _size(tenth: int, workers: int) -> int:
    """All of the workers and half of them, in turn."""
    return workers if tenth % 2 else workers // 2


def _decisions(config: ExperimentConfig, run: Path, workers: int) -> Figures:
    """Polls of the policy through a whole run, in which nodes leave and are taken again and again."""
    describe_run(_made(run), config, run.parent / "data")
    scaling: Any = ray.train.ScalingConfig(
        num_workers=(1, workers), use_gpu=True, resources_per_worker={"CPU": 8, "GPU": 1}
    )
    cluster, plan = FakeCluster.of(workers), config.plan
    objective = ScalingObjective(min_workers=1, max_workers=workers, minimise="cost")
    decider = ScalingDecider(plan=plan, sizes=tuple(legal_sizes(plan, objective)), lead_s=30.0, patience_s=0.0)
    took, progress, resizes = list[float](), list[float](), 0
    with cluster.policy(scaling, DecidedJob(config, run), decider) as policy:
        policy.control.reset()
        other = Progress(run)
        size, done = plan.segments[0].workers, 0
        group, journal = cluster.group(size), Journal(run, rank=0, world_size=size, start=0)
        for number in range(_POLLS):
            cluster.leaving = frozenset(cluster.nodes[:1] if number % 50 > 40 else ())
            cluster.taken = frozenset(cluster.nodes[1::2] if number % 70 > 60 else ())
            waits = policy.control.pauses or done == plan.next_resize(done - 1)
            if waits and not policy.control.goes_on(done):
                journal.pause(done, checkpoint_s=1.0)
            else:
                done = min(done + max(1, plan.steps // _POLLS), plan.next_resize(done))
                journal.record(report(config, done, size), [])
            progress.append(seconds(other.update))
            decided: list[Any] = []
            took.append(
                seconds(lambda g=group, d=decided: d.append(policy.make_decision_for_running_worker_group(g, None)))
            )
            if size := getattr(decided[0], "num_workers", 0):
                resizes += 1
                group, journal = cluster.group(size), Journal(run, rank=0, world_size=size, start=done)
            size = group.num_workers
    return _spread("decision", took) | _spread("progress_poll", progress) | {"resizes": figure([resizes], "resizes")}


def _spread(name: str, took: Sequence[float]) -> Figures:
    milliseconds = [1000 * one for one in took]
    p95 = quantiles(milliseconds, n=20, method="inclusive")[-1]
    return {f"{name}_ms": figure(milliseconds, "ms"), f"{name}_p95_ms": figure([p95], "ms")}


def _record(config: ExperimentConfig, run: Path, workers: int, steps: int) -> Figures:
    """The ledger and the live record of a run, its audit, and those who follow it."""
    describe_run(_made(run), config, run.parent / "data")
    gathered = Gathered()
    ways = [gathered.take, *[gathered.give] * (workers - 1)]
    journals = [Journal(run, rank=rank, world_size=workers, start=0, gather=way) for rank, way in enumerate(ways)]
    every = max(1, steps // _COMMITS)
    record, commit, others = list[float](), list[float](), list[float]()
    for step, shares in _shares(config, run, workers, every * _COMMITS):
        done = report(config, step, workers)
        for journal, ids in zip(journals[1:], shares[1:], strict=True):
            journal.record(done, ids)
        record.append(seconds(lambda d=done, s=shares: journals[0].record(d, s[0])))
        if step % every == 0:
            others += [seconds(lambda j=journal, s=step: j.commit(s)) for journal in journals[1:]]
            commit.append(seconds(lambda s=step: journals[0].commit(s)))
    steps = every * _COMMITS
    checkpoint = _made(run / CHECKPOINTS / step_name(steps))
    write_meta(checkpoint, {"step": steps}, {})
    audited = seconds(lambda: _checked(run))
    return {
        "record_us": figure([1e6 * one for one in record], "us"),
        "commit_rank_0_ms": figure([1000 * one for one in commit], "ms"),
        "commit_other_rank_ms": figure([1000 * one for one in others], "ms"),
        **_sizes(run, workers, steps),
        "audit_per_1000_steps_s": figure([audited / steps * 1000], "s"),
        **_followed(config, run, workers),
    }


def _sizes(run: Path, workers: int, steps: int) -> Figures:
    parts = [part.stat().st_size for part in (run / LEDGER).iterdir()]
    reports = [part.stat().st_size for part in (run / STEPS).iterdir()]
    return {
        "ledger_parts": figure([len(parts)], "files"),
        "ledger_largest_part_bytes": figure([max(parts)], "bytes"),
        "ledger_bytes_per_step": figure([sum(parts) / steps], "bytes"),
        "ledger_bytes_per_step_and_rank": figure([sum(parts) / steps / workers], "bytes"),
        "steps_parts": figure([len(reports)], "files"),
        "steps_bytes_per_step": figure([sum(reports) / steps], "bytes"),
        "live_bytes_per_step": figure([(run / METRICS).stat().st_size / steps], "bytes"),
    }


def _followed(config: ExperimentConfig, run: Path, workers: int) -> Figures:
    """What is exported of the run, and a look of who follows it."""
    metrics, times = RunMetrics(config), RankTimes(Journal(run, rank=1, world_size=workers, start=0))
    for line in MetricsTail(run).read(limit=-1):
        metrics.take(line)
    times.record(report(config, 1, workers), [])
    follower = Follower(run, config)
    return {
        "series_of_run": figure([len(metrics.values(time.time()))], "series"),
        "series_of_ranks_on_request": figure([len(times.values()) * workers], "series"),
        "follow_poll_ms": figure([1000 * seconds(follower.update) for _ in range(_TRIES)], "ms"),
    }


def _checkpoint(config: ExperimentConfig, folder: Path, workers: int, strategy: str) -> Figures:
    """The index of a checkpoint: written by rank 0 at the end of a save, read, and looked at by who waits for nodes."""
    checkpoint = _made(folder / step_name(1))
    state: Any = fake_state(config, workers, sharded=strategy == "fsdp")
    results = fake_parts(checkpoint, state, workers)
    commit = seconds(partial(CheckpointWriter(checkpoint, {"step": 1}).finish, Metadata(state), results))
    del results
    return {
        f"{strategy}_parts": figure([sum(len(tensor.chunks) for tensor in state.values())], "parts"),
        f"{strategy}_index_bytes": figure([(checkpoint / INDEX).stat().st_size], "bytes"),
        f"{strategy}_index_commit_s": figure([commit], "s"),
        f"{strategy}_index_read_s": figure([seconds(lambda: read_index(checkpoint))], "s"),
        f"{strategy}_complete_ms": figure(
            [1000 * seconds(lambda: check_complete(checkpoint)) for _ in range(_TRIES)], "ms"
        ),
    }


def report(config: ExperimentConfig, step: int, workers: int) -> StepReport:
    """Of a step that took a second."""
    plan = config.plan
    return StepReport(
        step=step,
        loss=2.0 + 1 / step,
        val_loss=None,
        grad_norm=1.0,
        lr=plan.lr(step - 1),
        kept_length=plan.at(step - 1).kept_length,
        tokens=step * plan.tokens_per_step,
        layer_tokens=plan.layer_tokens(step),
        flops=float(plan.flops(step)),
        world_size=workers,
        data_time_s=0.01,
        step_time_s=1.0,
    )


def _shares(config: ExperimentConfig, run: Path, workers: int, steps: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Each step, with the samples of each rank in it: micro batches of one."""
    committed = read_manifest(run.parent / "data").committed("train")
    order, batch = sample_order(config.data, seed=config.seed), config.train.global_batch
    for step in range(1, steps + 1):
        ids = order.sample_ids(np.arange((step - 1) * batch, step * batch), committed).tolist()
        yield step, [ids[rank::workers] for rank in range(workers)]


def _checked(run: Path) -> None:
    found = audit(run)
    assert found.is_clean, f"the ledger of made-up workers lacks {found.missing} and repeats {found.repeated} samples"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def seconds(call: Callable[[], object]) -> float:
    """What a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
