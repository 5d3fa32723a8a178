"""One worker: build, attach, restore, run the loop."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.batches import RowBatches, Samples
from tokendrop.data.rows import MappedSamples, Rows, held_out_ids, sample_order
from tokendrop.method import Dropping, attach
from tokendrop.models.build import build_model
from tokendrop.track.journal import Journal
from tokendrop.track.run_folder import CHECKPOINTS
from tokendrop.train.checkpoint import Checkpoints, committed
from tokendrop.train.device import pick_device, pick_dtype, tune_cpu
from tokendrop.train.engine import Engine
from tokendrop.train.engines.build import apply_strategy
from tokendrop.train.loop import Parts, train

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


def run_worker(task: WorkerTask, *, local_rank: int = 0, samples: Samples | None = None) -> None:
    """Train as one worker of the process group, or alone without one; goes on from the last checkpoint.

    Args:
        samples: where training samples come from; the mapped token shards when left out.
    """
    config = task.config
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = pick_device(local_rank)
    tune_cpu(config.scaling.cpus_per_worker)
    engine, dropping = build_engine(config, device)
    checkpoints = Checkpoints(
        task.run / CHECKPOINTS,
        keep=config.checkpoint.keep,
        meta={"model": asdict(config.model), "name": config.name},
    )
    saved = committed(task.run / CHECKPOINTS)
    start = checkpoints.load(engine, saved[-1]) if saved else 0

    batches = RowBatches(
        train=samples or MappedSamples(Rows(task.data, "train"), sample_order(config.data, seed=config.seed)),
        validation=task.held_out or held_out_rows(config, task.data),
        split=replace(config.plan().batch, world_size=world_size),
        rank=rank,
        device=device,
    )
    parts = Parts(
        engine=engine,
        dropping=dropping,
        batches=batches,
        checkpoints=checkpoints,
        recorder=Journal(task.run, rank=rank, world_size=world_size, start=start),
        world_size=world_size,
    )
    train(config, parts, start=start)


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


def compile_layers(layers: torch.nn.ModuleList) -> None:
    """Compile each layer: one graph for the full length, one for every kept length.

    Dynamo's quiet way out, running eagerly after too many graphs, becomes an error: it would pass for a slow GPU.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        layer.compile()
