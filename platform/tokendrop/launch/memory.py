"""Whether a run's workers can find room in this machine's memory at all."""

import os
from collections.abc import Sequence

import psutil

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.output import count

_NUMBERS = 4  # for each parameter: its weight, its gradient, and Adam's two moments
_SHARED = 3  # of these, by strategies that share them out; the weights are made whole first


def check_memory(config: ExperimentConfig) -> None:
    """Raises UserError where the workers' parameters are too large for this machine, on which they all will be.

    Counts no more than every run takes, so a run that passes may still be too large. Says nothing of GPUs, nor of the
    machines of another cluster.
    """
    scaling = config.scaling
    if scaling.gpus_per_worker or os.environ.get("RAY_ADDRESS"):
        return
    workers = scaling.workers if scaling.mode == "fixed" else 1
    shape, need, have = config.model.shape, least_bytes(config, workers=workers), psutil.virtual_memory().total
    if need > have:
        raise UserError(
            f"model: {count(shape.parameters)} parameters with their gradients and Adam's moments, and a micro batch,"
            f" want {count(need)}B of memory for {workers:,} workers, this machine has {count(have)}B; want a smaller"
            " model, micro batch or scaling.workers"
        )


def least_bytes(config: ExperimentConfig, *, workers: int) -> int:
    """Of the workers' parameters with all that goes with them, and of a micro batch before its first layer."""
    shape, train = config.model.shape, config.train
    if train.strategy == "ddp":  # of layers that a group shares out, the weights are made whole first
        elsewhere = shape.layer_parameters - shape.layer_parameters // train.tensor_parallel
        held = workers * max(shape.parameters, _NUMBERS * (shape.parameters - elsewhere))
    else:
        held = (workers * (_NUMBERS - _SHARED) + _SHARED) * shape.parameters
    sequences = train.micro_batch * config.task.sequences_per_sample
    first_layer = workers * sequences * shape.sequence_length * shape.width
    return (held + first_layer) * (8 if train.precision == "fp64" else 4)


def fit_at_once(configs: Sequence[ExperimentConfig]) -> bool:
    """Whether one worker of each job fits into half of the memory that is free here; layers want the other half."""
    return sum(least_bytes(config, workers=1) for config in configs) <= psutil.virtual_memory().available / 2
