"""One worker: build, attach, restore, run the loop."""

import platform
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.batches import MicroBatches, Samples, text_batch
from tokendrop.data.rows import MappedSamples, Rows, held_out_ids, sample_order
from tokendrop.errors import UserError
from tokendrop.launch.orders import Orders
from tokendrop.method import Dropping, attach
from tokendrop.models.build import build_model
from tokendrop.track.journal import Journal
from tokendrop.track.run_folder import CHECKPOINTS, JOB
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.device import compile_layers, pick_device, pick_dtype, tune_cpu
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


def run_worker(
    task: WorkerTask, *, local_rank: int = 0, samples: Samples | None = None, orders: Orders | None = None
) -> None:
    """Train as one worker of the process group, or alone without one, from the last checkpoint to where workers change.

    Args:
        samples: where training samples come from; the mapped token shards when left out.
        orders: of a controller that follows the plan; where workers change, it is waited for what it decides.
    """
    config, called = task.config, time.time()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    check_shared(task.run)
    device = pick_device(local_rank)
    tune_cpu(config.scaling.cpus_per_worker)
    engine, dropping = build_engine(config, device)
    checkpoints = Checkpoints(
        task.run / CHECKPOINTS,
        keep=config.checkpoint.keep,
        meta={"model": asdict(config.model), "name": config.name},
    )
    newest = checkpoints.newest()
    start = checkpoints.load(engine, newest) if newest else 0

    marks = [*(orders.marks if orders else ()), ("start", called), ("restore", time.time())]
    if orders is not None:
        orders.begin(start, device.type)
    batches = MicroBatches(
        partial(text_batch, device=device),
        train=samples or MappedSamples(Rows(task.data, "train"), sample_order(config.data, seed=config.seed)),
        validation=task.held_out or held_out_rows(config, task.data),
        split=replace(config.plan().batch, world_size=world_size),
        rank=rank,
    )
    parts = Parts(
        engine=engine,
        dropping=dropping,
        batches=batches,
        checkpoints=checkpoints,
        recorder=Journal(task.run, rank=rank, world_size=world_size, start=start, marks=marks),
        world_size=world_size,
        pause=orders.asked if orders else never,
    )
    follow(config, parts, orders, start=start)


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


def follow(config: ExperimentConfig, parts: Parts, orders: Orders | None, *, start: int) -> None:
    """Train to where the workers change; where orders say that they don't, go on to the next place, and so on."""
    plan, step = config.plan(), start
    while step < plan.steps:
        step = train(config, parts, start=step, stop=plan.next_resize(step))
        if orders is None or step == plan.steps:
            return
        orders.wait(step)


def never(step: int) -> bool:
    return False


def held_out_rows(config: ExperimentConfig, data: Path) -> HeldOut:
    """The validation rows of a run."""
    rows = Rows(data, "validation")
    ids = held_out_ids(config.data, rows.committed, config.evaluate.sequences)
    return ids, rows.read(ids)


def build_engine(config: ExperimentConfig, device: torch.device) -> tuple[Engine, Dropping | None]:
    """The job's model on its device, with the layers that drop tokens, under its strategy."""
    training = config.train
    dtype = pick_dtype(training.precision, device)
    model = build_model(config.model, seed=config.seed, activation_checkpointing=training.activation_checkpointing)
    model = model.to(device, torch.promote_types(dtype, torch.float32))
    dropping = None
    if config.drop.method == "random_ltd":
        dropping = attach(model, seed=config.seed, whole_layers=config.drop.whole_layer_numbers())
    if training.compile:
        compile_layers(model.blocks)
    return apply_strategy(model, training, dtype), dropping
