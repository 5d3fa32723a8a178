"""One worker of a run: build, restore, train, with the run folder for a record."""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.read.batches import MicroBatches
from tokendrop.data.shards.cache import folder_here
from tokendrop.elastic.control import RunControl, WorkerControl
from tokendrop.errors import UserError
from tokendrop.launch.collectives import broadcast_from_rank_0, gather_on_rank_0
from tokendrop.launch.compiled import leave_compiled, take_compiled
from tokendrop.launch.decisions import decisions_of
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.method import Dropping, TokenScores
from tokendrop.models.batch import Batch, Samples
from tokendrop.track.environment import describe_workers, device_of_workers
from tokendrop.track.journal import Journal
from tokendrop.track.prometheus import exporting_rank, tags_of
from tokendrop.track.run_folder import ENVIRONMENT, JOB, TOKENIZER
from tokendrop.track.run_home import RunHome
from tokendrop.train.attention_kernel import attention_by
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS
from tokendrop.train.device import describe_device, tune_cpu
from tokendrop.train.engines.base import Engine
from tokendrop.train.initial import find_initial
from tokendrop.train.loop import TrainComponents
from tokendrop.train.trace import tracing
from tokendrop.train.warm_up import warm_up
from tokendrop.train.worker import build_engine, train_by_plan

_SEEN_WITHIN_S = 10.0  # so long what one machine writes to shared storage may take to be seen by the others


def never() -> bool:
    """For runs whose checkpoints are due at their steps alone."""
    return False


def run_worker(
    spec: WorkerSpec,
    *,
    device: torch.device | None = None,
    samples: Samples | None = None,
    must_save: Callable[[], bool] = never,
    home: RunHome | None = None,
) -> None:
    """Train as one worker of the process group, or alone without one, from the last checkpoint to where workers change.

    Args:
        device: to train on; the CPU when left out.
        samples: where training samples come from; the mapped token shards when left out.
        must_save: called by rank 0 after each step; whether a checkpoint is due.
        home: of a run that a store keeps.
    """
    config, called = spec.config, time.time()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = device or torch.device("cpu")
    known = _set_up(spec, device, rank)
    scores = config.drop.scores(config.model.vocab_size, device)
    checkpoints = _checkpoints(spec, scores, home)
    engine, dropping, start = _restored(config, checkpoints, device)
    checkpoints.go_on(start)

    timings = [*RunControl(spec.run).timings, ("start", called), ("restore", time.time())]
    control = WorkerControl(RunControl(spec.run), rank=rank, agree=broadcast_from_rank_0, must_save=must_save)
    journal = _journal(spec, rank, world_size, start=start, timings=timings)
    components = TrainComponents(
        engine=engine,
        dropping=dropping,
        batches=batches_of(spec, samples, world_size=world_size, rank=rank, device=device),
        checkpoints=checkpoints,
        recorder=journal,
        world_size=world_size,
        decisions=decisions_of(config, spec.run, rank=rank, group=checkpoints.group, start=start),
        scores=scores,
        reads_behind=int(device.type != "cpu"),
        pause=control.pause_requested,
    )
    with attention_by(config, device, checkpoints.group, start=start, world_size=world_size, known=known) as attention:
        if rank == 0 and attention != known:
            _describe(spec, device, attention)
        _compile(spec, components, journal, start=start, rank=rank)
        with _followed(spec, components, journal, rank=rank) as followed:
            train_by_plan(config, followed, control, start=start)


def _set_up(spec: WorkerSpec, device: torch.device, rank: int) -> Mapping[str, Any] | None:
    """Make this process ready to train, and let rank 0 describe it; raises as `check_shared` does.

    Returns:
        On rank 0, how attention was computed before on such a device, as far as it is known.
    """
    check_shared(spec.run)
    tune_cpu(spec.config.scaling.cpus_per_worker)
    if rank != 0:
        return None
    before = device_of_workers(spec.run / ENVIRONMENT)
    known = before.get("attention") if before.get("name") == describe_device(device)["name"] else None
    known = known if isinstance(known, dict) else None
    _describe(spec, device, known)
    return known


def _describe(spec: WorkerSpec, device: torch.device, attention: Mapping[str, Any] | None) -> None:
    described = describe_device(device)
    if attention is not None:
        described["attention"] = attention
    describe_workers(spec.run / ENVIRONMENT, described)


def _checkpoints(spec: WorkerSpec, scores: TokenScores | None, home: RunHome | None) -> Checkpoints:
    config = spec.config
    meta = {"model": asdict(config.model), "name": config.name}
    folder, keep = spec.run / CHECKPOINTS, config.checkpoint.keep
    return Checkpoints(folder, keep=keep, meta=meta, scores=scores, store=home, leads=spec.leads)


def _restored(
    config: ExperimentConfig, checkpoints: Checkpoints, device: torch.device
) -> tuple[Engine, Dropping | None, int]:
    """The engine, what drops tokens in it, and the steps done: by the last checkpoint, or from the first step on."""
    newest = checkpoints.newest()
    place = config.model.init_from if newest is None else None
    initial = None if place is None else find_initial(place, config.model.kind, checkpoints.group)
    engine, dropping = build_engine(config, device, initial=initial)
    return engine, dropping, checkpoints.load(engine, newest) if newest else 0


def _journal(
    spec: WorkerSpec, rank: int, world_size: int, *, start: int, timings: Sequence[tuple[str, float]]
) -> Journal:
    ranks = {"rank": rank, "world_size": world_size, "group": spec.config.train.group}
    return Journal(spec.run, **ranks, start=start, timings=timings, gather=gather_on_rank_0)


def _compile(spec: WorkerSpec, components: TrainComponents, journal: Journal, *, start: int, rank: int) -> None:
    """What the steps from `start` on would wait for, and how long it took, which is a part of a change of workers."""
    if not spec.config.train.compile:
        return
    take_compiled(spec.run)
    warm_up(spec.config, components, start=start)
    if rank == 0:
        leave_compiled(spec.run)
    components.checkpoints.wait_for_all()  # longer than a step's collectives do: some machines have it compiled already
    journal.passed("compile")


@contextmanager
def _followed(
    spec: WorkerSpec, components: TrainComponents, journal: Journal, *, rank: int
) -> Iterator[TrainComponents]:
    """Within the block, steps are exported, and those of them traced that the job wants."""
    track, profile = spec.config.track, spec.config.train.profile
    ranks = {"rank": rank, "world_size": components.world_size, "wanted": track.ranks}
    with (
        tracing(profile if rank == 0 else None, spec.run, components.engine) as trace,
        exporting_rank(journal, tags_of(spec.run, track.sweep), **ranks) as recorder,
    ):
        yield replace(components, recorder=recorder, trace=trace)


def batches_of(
    spec: WorkerSpec, samples: Samples | None, *, world_size: int, rank: int, device: torch.device
) -> MicroBatches[Batch]:
    """This worker's share of the training samples, and of the held-out rows."""
    config = spec.config
    folder = folder_here(config.data, spec.data) if samples is None else spec.data
    data = config.task.build(config).open(folder, tokenizer=spec.run / TOKENIZER)
    return MicroBatches(
        data.batch,
        train=samples or data.samples,
        validation=spec.held_out or data.held_out(),
        split=replace(config.plan.batch, world_size=world_size),
        rank=rank,
        device=device,
    )


def check_shared(run: Path) -> None:
    """Raises UserError where this worker does not see the run's folder, which the driver has made."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not (run / JOB).is_file():
        if time.monotonic() > deadline:
            raise UserError(
                f"runs_folder: {run} does not exist on {platform.node()}, where a worker runs; want a folder that"
                " all machines share"
            )
        time.sleep(0.2)
