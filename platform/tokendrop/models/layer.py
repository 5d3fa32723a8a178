"""What the layers of all models have in common."""

from typing import ClassVar, Protocol

from torch import Tensor, nn

from tokendrop.errors import UserError


class TokenGroup(Protocol):
    """Workers that share out the tokens of a layer, in order; each has as many, the last ones filled up with zeros."""

    rank: int
    """This worker's place among them."""

    def own(self, whole_BSD: Tensor) -> Tensor:
        """This worker's share of all tokens, (B, P, D)."""
        ...

    def whole(self, own: Tensor, *, dim: int) -> Tensor:
        """The shares of all workers one after the other, along a dimension; gradients are added up over the workers."""
        ...


class Layer(nn.Module):
    """A layer that can compute its activations again in the backward pass, in place of keeping them."""

    shares_tokens: ClassVar[bool] = False
    """Whether it heeds a `token_group`."""
    recompute = False
    """Whether it does so in training; `recompute_layers` sets it."""
    token_group: TokenGroup | None = None
    """With whom it shares its tokens."""


def hands_on_once(model: nn.Module) -> bool:
    """Whether nothing but the next layer reads what a layer of the model hands on, so that it may be written over.

    The model's own class says so by `HANDS_ON_ONCE`; one derived from it may read more, and has to say it anew.
    """
    return bool(vars(type(model)).get("HANDS_ON_ONCE"))


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
