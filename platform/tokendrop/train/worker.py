"""A worker's model on its device, and training to where the workers change; whatever starts the worker."""

from typing import Protocol

import torch
import torch.distributed as dist

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.method import ROUTER, Dropping
from tokendrop.models.layer import recompute_layers
from tokendrop.schedule.shapes import layer_shapes
from tokendrop.train.device import compile_layers, pick_dtype
from tokendrop.train.dropping import attach_method, with_added_loss
from tokendrop.train.engines.base import Engine
from tokendrop.train.engines.build import apply_strategy
from tokendrop.train.fp8 import multiply_in_fp8
from tokendrop.train.initial import InitialWeights, begin_with
from tokendrop.train.loop import TrainComponents, train


class Control(Protocol):
    """Who says at a committed step whether the workers train on."""

    def next(self, step: int, *, waits: bool, is_edge: bool = False) -> bool:
        """Whether to train on from a committed step; called by all ranks at once.

        Args:
            waits: for a decision; else the workers end where they paused, unless that was for a checkpoint alone.
            is_edge: whether other workers are planned from here on.
        """
        ...


def build_engine(
    config: ExperimentConfig, device: torch.device, *, initial: InitialWeights | None = None
) -> tuple[Engine, Dropping | None]:
    """The job's model on its device, with the layers that drop tokens, under its strategy.

    Args:
        initial: the weights that it begins with; without them, random ones.
    """
    task, training = config.task.build(config), config.train
    dtype = pick_dtype(training.precision, device)
    model = task.build_model(seed=config.seed).to(device, torch.promote_types(dtype, torch.float32))
    layers = task.layers(model)
    multiply_in_fp8(layers, config, device)  # before a method adds modules of its own
    dropping = attach_method(config, model, layers)
    if initial is not None:
        begin_with(model, initial, may_be_new=(*task.may_be_new, f"{ROUTER}."), are_new=task.are_new)
    if training.compile:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        shapes = len(layer_shapes(config.plan, world_size=world_size))
        is_static = training.compile == "static"
        compile_layers(layers, static=is_static, shapes=shapes, cuda_graphs=training.cuda_graphs)
    recompute_layers(model, again=config.plan.at(0).recomputes)  # for benchmarks; the loop asks the plan
    loss, timeout_s = with_added_loss(task.loss, dropping), config.scaling.peer_timeout_s
    return apply_strategy(model, layers, loss, training, dtype, timeout_s=timeout_s), dropping


def train_by_plan(config: ExperimentConfig, components: TrainComponents, control: Control, *, start: int) -> None:
    """Train to where the workers change or are stopped; where they go on as they are, to the next such place."""
    step, waits = start, config.scaling.mode == "schedule"
    while step < config.steps:
        step = train(config, components, start=step)
        if step == config.steps:
            return
        plan = components.plan(config)
        is_edge = plan.at(step).workers != plan.at(step - 1).workers
        if not control.next(step, waits=waits, is_edge=is_edge):
            return
