"""A layer that runs on its kept tokens: gather -> layer -> combine."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokendrop.method.draw import draw_positions
from tokendrop.method.side_inputs import KNOWN_SIDE_INPUTS, TokenDims, restrict
from tokendrop.method.tokens import combine_tokens, gather_tokens


class Dropping:
    """The drops of one model: drawn before each forward pass, read by its dropped layers."""

    def __init__(self, layers: Sequence[int], *, seed: int, side_inputs: TokenDims) -> None:
        self.layers = tuple(layers)
        self.seed = seed
        self.side_inputs = {**KNOWN_SIDE_INPUTS, **side_inputs}
        self._kept: dict[int, Tensor] = {}
        self._sequence_length = 0

    def draw(
        self,
        *,
        kept_length: int | Mapping[int, int],
        step: int,
        sample_ids: Tensor,
        sequence_length: int,
        device: torch.device | None = None,
    ) -> None:
        """Choose the tokens that the next forward pass keeps; at full length the layers run as they are.

        Args:
            kept_length: tokens kept, for all dropped layers or by layer number.
            sample_ids: int64 (B), what tells the samples of this micro batch apart; on the host, or they are
                waited for.
            device: where the model runs; that of the sample ids when left out.
        Raises:
            ValueError: a kept length is not in 1..sequence_length.
        """
        lengths = [kept_length if isinstance(kept_length, int) else kept_length[layer] for layer in self.layers]
        shorter = [(layer, kept) for layer, kept in zip(self.layers, lengths, strict=True) if kept != sequence_length]
        positions = draw_positions(
            seed=self.seed,
            step=step,
            sample_ids_B=sample_ids,
            layers=[layer for layer, _ in shorter],
            kept_lengths=[kept for _, kept in shorter],
            sequence_length=sequence_length,
            device=device,
        )
        self._kept = {layer: kept_BK for (layer, _), kept_BK in zip(shorter, positions, strict=True)}
        self._sequence_length = sequence_length

    def kept(self, layer: int) -> Tensor | None:
        """Kept positions of a layer, int64 (B, K) ascending; None where it sees every token."""
        return self._kept.get(layer)

    def check_drawn_for(self, hidden_BSD: Tensor, kept_BK: Tensor) -> None:
        """Raises ValueError for hidden states of another shape than the draw was made for."""
        drawn = (len(kept_BK), self._sequence_length)
        if hidden_BSD.shape[:2] != drawn:
            raise ValueError(
                f"kept tokens were drawn for {drawn[0]} sequences of {drawn[1]} tokens, the layer got"
                f" {tuple(hidden_BSD.shape[:2])}; call draw() before each forward pass"
            )


class DroppedLayer(nn.Module):
    """What `attach` puts in front of a layer's own class.

    It stands at `__call__`, not at `forward`: outside of `Module.compile` and of activation checkpointing, so
    that only the layer itself is compiled or computed again, on kept tokens that were chosen once. Parameter
    names, attributes and `isinstance` stay those of the plain layer.
    """

    plain_class: ClassVar[type[nn.Module]]
    _dropping: Dropping
    _layer_number: int

    def follow(self, dropping: Dropping, layer_number: int) -> None:
        """Keep, from now on, the tokens that `dropping` draws for this layer."""
        self._dropping, self._layer_number = dropping, layer_number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept_BK = self._dropping.kept(self._layer_number) if self.training else None
        if kept_BK is None:
            return super().__call__(*args, **kwargs)
        hidden_BSD, sides = _inputs_by_name(type(self), args, kwargs)
        self._dropping.check_drawn_for(hidden_BSD, kept_BK)
        length, known = hidden_BSD.shape[1], self._dropping.side_inputs
        sides = {name: restrict(name, side, kept_BK, length, known) for name, side in sides.items()}
        kept_BKD, rest_BSD = gather_tokens(hidden_BSD, kept_BK)
        out = super().__call__(kept_BKD, **sides)
        if isinstance(out, tuple):
            return (combine_tokens(rest_BSD, out[0], kept_BK), *out[1:])
        return combine_tokens(rest_BSD, out, kept_BK)


@cache
def dropped_class(plain: type[nn.Module]) -> type[DroppedLayer]:
    """The class of a dropped layer whose own class is `plain`."""
    return type(f"Dropped{plain.__name__}", (DroppedLayer, plain), {"plain_class": plain})


def _inputs_by_name(cls: type[nn.Module], args: Any, kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
    """A layer's hidden states, its first input, and every other input by the name that its forward gives it."""
    names = _positional_names(cls)
    named = dict(zip(names, args, strict=False)) | kwargs
    return named.pop(names[0]), named


@cache
def _positional_names(cls: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
