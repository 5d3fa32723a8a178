"""Matrix products of a model's layers in fp8, by torchao."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.fp8 import MULTIPLE
from tokendrop.config.train import TrainConfig
from tokendrop.errors import UserError
from tokendrop.schedule.shapes import layer_shapes
from tokendrop.train.installed import check_fp8_installed

_FIRST_WITH_FP8 = (8, 9)  # compute capability: Ada; Hopper has 9.0


def computes_in_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for matrix products in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def check_fp8_here(training: TrainConfig, device: torch.device) -> None:
    """Raises UserError where a job wants fp8 and it can't be had on the device, or torchao is not installed."""
    check_fp8_installed(training)
    if training.fp8 is not None and not training.fp8_emulated and not computes_in_fp8(device):
        raise UserError(
            f"train.fp8: this {device.type} has no fp8; want a GPU of compute capability 8.9 or more, such as an H100,"
            " no fp8, or to try it train.fp8_emulated: true"
        )


def multiply_in_fp8(layers: nn.ModuleList, config: ExperimentConfig, device: torch.device) -> None:
    """Let the linear modules of a model's layers multiply in fp8 where the job says so, in place.

    Forward and backward, inputs, weights and gradients are scaled just before each product by the largest value of the
    tensor, or of each row, in the micro batch at hand: nothing is kept between steps. Parameters, their names and their
    dtypes stay, so checkpoints are those of a model without fp8. Embeddings, norms, head and learned routers stay too.
    Validation in training runs as training does, in fp8; commands that read a checkpoint build a model without it.

    Raises:
        UserError: torchao is not installed, the device has no fp8, or a module's sizes are no multiples of 16.
    """
    training = config.train
    if training.fp8 is None:
        return
    check_fp8_here(training, device)
    _check_sizes(layers)
    # imported late: most installations do without
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(training.fp8)
    recipe = replace(recipe, emulate=training.fp8_emulated, pad_inner_dim=_wants_padding(config))
    convert_to_float8_training(layers, config=recipe)


def _check_sizes(layers: nn.ModuleList) -> None:
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
            raise UserError(
                f"train.fp8: want linear modules whose sizes are multiples of {MULTIPLE}, got"
                f" {module.in_features} x {module.out_features} in layer {name}; want other sizes, or no fp8"
            )


def _wants_padding(config: ExperimentConfig) -> bool:
    """Whether layers may see a number of tokens at a time that is no multiple of 16.

    A weight's gradient is a product over these tokens, to which torchao then adds zeros: a copy more.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    shapes = layer_shapes(config.plan, world_size=world_size)
    return not config.drop.has_known_shapes or any(size * tokens % MULTIPLE for size, tokens, _ in shapes)
