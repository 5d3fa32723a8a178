"""One worker: build, attach, restore, run the loop."""

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.batches import MicroBatches, Samples, text_batch
from tokendrop.data.manifest import ManifestReader
from tokendrop.data.rows import MappedSamples, Rows, held_out_ids, sample_order
from tokendrop.elastic.control import RunControl, WorkerControl
from tokendrop.errors import UserError
from tokendrop.method import Dropping, attach, routes_along
from tokendrop.models.batch import Batch
from tokendrop.models.build import build_model
from tokendrop.track.environment import describe_workers
from tokendrop.track.journal import Journal
from tokendrop.track.run_folder import CHECKPOINTS, ENVIRONMENT, JOB
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.device import compile_layers, describe_device, pick_dtype, tune_cpu
from tokendrop.train.engine import Engine
from tokendrop.train.engines.build import apply_strategy
from tokendrop.train.loop import Parts, train

_SEEN_WITHIN_S = 10.0  # what one machine writes to shared storage, by the others

HeldOut = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Sample ids and rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What every worker of a run is told."""

    config: ExperimentConfig
    run: Path
    data: Path
    held_out: HeldOut | None = None
    """Validation rows, for workers that do not share the folder of the token shards."""


def never() -> bool:
    return False


def run_worker(
    task: WorkerTask,
    *,
    device: torch.device | None = None,
    samples: Samples | None = None,
    must_save: Callable[[], bool] = never,
) -> None:
    """Train as one worker of the process group, or alone without one, from the last checkpoint to where workers change.

    Args:
        device: to train on; the CPU when left out.
        samples: where training samples come from; the mapped token shards when left out.
        must_save: called by all ranks after each step; whether a checkpoint is due, on all of them the same.
    """
    config, called = task.config, time.time()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    check_shared(task.run)
    tune_cpu(config.scaling.cpus_per_worker)
    device = device or torch.device("cpu")
    if rank == 0:
        describe_workers(task.run / ENVIRONMENT, describe_device(device))
    engine, dropping = build_engine(config, device)
    checkpoints = Checkpoints(
        task.run / CHECKPOINTS,
        keep=config.checkpoint.keep,
        meta={"model": asdict(config.model), "name": config.name},
    )
    newest = checkpoints.newest()
    start = checkpoints.load(engine, newest) if newest else 0

    timings = [*RunControl(task.run).timings, ("start", called), ("restore", time.time())]
    control = WorkerControl(RunControl(task.run), rank=rank, agree=said_by_rank_0, must_save=must_save)
    batches = batches_of(task, samples, world_size=world_size, rank=rank, device=device)
    parts = Parts(
        engine=engine,
        dropping=dropping,
        batches=batches,
        checkpoints=checkpoints,
        recorder=Journal(task.run, rank=rank, world_size=world_size, start=start, marks=timings),
        world_size=world_size,
        reads_behind=int(device.type != "cpu"),
        pause=control.pause_requested,
    )
    follow(config, parts, control, start=start)


def batches_of(
    task: WorkerTask, samples: Samples | None, *, world_size: int, rank: int, device: torch.device
) -> MicroBatches[Batch]:
    """This worker's share of the training samples, and of the held-out rows."""
    config = task.config
    manifest = ManifestReader(task.data)  # read once, for both
    order = sample_order(config.data, seed=config.seed)
    return MicroBatches(
        text_batch,
        train=samples or MappedSamples(Rows(task.data, "train", reader=manifest), order),
        validation=task.held_out or held_out_rows(config, task.data, reader=manifest),
        split=replace(config.plan().batch, world_size=world_size),
        rank=rank,
        device=device,
    )


def check_shared(run: Path) -> None:
    """Raises UserError where this worker does not see the run's folder, which the driver has made."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not (run / JOB).is_file():
        if time.monotonic() > deadline:
            raise UserError(
                f"runs_folder: {run} is not to be seen on {platform.node()}, where a worker runs; want a folder that"
                " all machines share"
            )
        time.sleep(0.2)


def follow(config: ExperimentConfig, parts: Parts, control: WorkerControl, *, start: int) -> None:
    """Train to where the workers change or are stopped; where they go on as they are, to the next such place."""
    plan, step, waits = config.plan(), start, config.scaling.mode == "schedule"
    while step < plan.steps:
        step = train(config, parts, start=step, stop=plan.next_resize(step))
        if step < plan.steps and not control.next(step, waits=waits):
            return


def said_by_rank_0(number: int) -> int:
    """The number that rank 0 calls this with; called by all ranks at once."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    said = torch.tensor(number)
    dist.broadcast(said, 0)
    return int(said)


def held_out_rows(config: ExperimentConfig, data: Path, *, reader: ManifestReader | None = None) -> HeldOut:
    """The validation rows of a run."""
    rows = Rows(data, "validation", reader=reader)
    ids = held_out_ids(config.data, rows.committed, config.evaluate.sequences)
    return ids, rows.read(ids)


def build_engine(config: ExperimentConfig, device: torch.device) -> tuple[Engine, Dropping | None]:
    """The job's model on its device, with the layers that drop tokens, under its strategy."""
    training = config.train
    dtype = pick_dtype(training.precision, device)
    model = build_model(config.model, seed=config.seed, activation_checkpointing=training.activation_checkpointing)
    model = model.to(device, torch.promote_types(dtype, torch.float32))
    dropping = None
    if (spans := config.drop.spans(config.model.layers)) and not config.drop.cuts:
        dropping = attach(model, seed=config.seed, routes=routes_along(spans, config.drop.selector()))
    if training.compile:
        compile_layers(model.blocks)
    return apply_strategy(model, training, dtype), dropping
