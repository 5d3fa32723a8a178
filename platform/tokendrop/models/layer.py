"""What the layers of all models have in common."""

from torch import nn

from tokendrop.errors import UserError


class Layer(nn.Module):
    """A layer that can compute its activations again in the backward pass, in place of keeping them."""

    recompute = False
    """Whether it does so in training; `recompute_layers` sets it."""


def recompute_layers(model: nn.Module, *, again: bool) -> None:
    """Let all layers of a model compute their activations again in the next backward passes, or keep them.

    Neither a loss nor a gradient changes by it.

    Raises:
        UserError: none of the model's layers can.
    """
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    if again and not layers:
        raise UserError(
            f"train.activation_checkpointing: {type(model).__name__} has no layer that can be computed again, a"
            " tokendrop.models.layer.Layer; want false"
        )
    for layer in layers:
        layer.recompute = again
