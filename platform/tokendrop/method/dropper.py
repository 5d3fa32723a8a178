"""Layers that run on their kept tokens: gather -> layers of the span -> combine."""

import inspect
import operator
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokendrop.method.route import DrawContext, Route
from tokendrop.method.side_inputs import KNOWN_SIDE_INPUTS, TokenDims, restrict, without_cache
from tokendrop.method.tokens import combine_tokens, gather_tokens

# Dimensions: B micro batch, S sequence, K kept length, D width.


class Dropping:
    """The drops of one model: drawn before each forward pass, read by its dropped layers."""

    def __init__(self, routes: Sequence[Route], *, seed: int, side_inputs: TokenDims) -> None:
        """
        Args:
            routes: numbered from 0, with no layer in two of them.
        """
        self.routes = tuple(sorted(routes, key=lambda route: route.first))
        self.layers = tuple(layer for route in self.routes for layer in range(route.first, route.last + 1))
        self.seed = seed
        self.side_inputs = {**KNOWN_SIDE_INPUTS, **side_inputs}
        self._route_of = {layer: route for route in self.routes for layer in range(route.first, route.last + 1)}
        self._sequence_length = 0
        self._kept: dict[Route, Tensor] = {}
        self._rest: dict[Route, tuple[Tensor, bool]] = {}
        """Of each route that tokens have left, what they rejoin, and whether gradients were wanted then."""
        self._is_drawn = self._has_warned = False

    def draw(
        self,
        *,
        kept_length: int | Mapping[int, int],
        step: int,
        sample_ids: Tensor | Sequence[int],
        sequence_length: int,
        device: torch.device | None = None,
        always: Tensor | Sequence[int] = (),
        scores: Tensor | None = None,
    ) -> None:
        """Choose the tokens that the next forward pass keeps; at full length the layers run as they are.

        Args:
            kept_length: tokens kept, for all routes or by the number of a route's first layer.
            sample_ids: int64 (B), what tells the samples of this micro batch apart; on the host, or they are
                waited for.
            device: where the model runs; that of the sample ids when left out.
            always: positions of tokens that stay in every route, such as 0 for [CLS]; or bool (B, S), on the host.
            scores: float (B, S), for routes that choose by the score of each token.
        Raises:
            ValueError: a kept length is not in 1..sequence_length, or less than the tokens that always stay.
        """
        ids_B = torch.as_tensor(sample_ids)
        context = DrawContext(
            seed=self.seed,
            step=step,
            sample_ids_B=ids_B,
            sequence_length=sequence_length,
            device=device or ids_B.device,
            always_BS=_always(always, len(ids_B), sequence_length),
            scores_BS=scores,
        )
        self._kept = {}
        for selector, routes in groupby(self.routes, key=lambda route: route.select):
            lengths = [(route, _length(kept_length, route)) for route in routes]
            shorter = [(route, kept) for route, kept in lengths if kept != sequence_length]
            firsts, kepts = [route.first for route, _ in shorter], [kept for _, kept in shorter]
            drawn = selector.select(context, firsts, kepts) if shorter else []
            self._kept |= {route: kept_BK for (route, _), kept_BK in zip(shorter, drawn, strict=True)}
        self._sequence_length, self._rest, self._is_drawn = sequence_length, {}, True

    def kept(self, layer: int) -> Tensor | None:
        """Kept positions of a layer, int64 (B, K) ascending; None where it sees every token."""
        route = self._route_of.get(layer)
        return None if route is None else self._kept.get(route)

    def warn_if_never_drawn(self) -> None:
        """Once, where the model trains and nothing was ever drawn: it would train at full length, unnoticed."""
        if not self._is_drawn and not self._has_warned:
            self._has_warned = True
            warnings.warn("draw() was never called on this model's Dropping: no token is dropped", stacklevel=4)

    def leave(self, layer: int, hidden_BSD: Tensor, kept_BK: Tensor) -> Tensor:
        """The hidden states that a layer runs on, (B, K, D); at the first layer of a route the others leave.

        Raises:
            ValueError: the hidden states have another shape than the draw was made for.
        """
        route, (batch, kept) = self._route_of[layer], kept_BK.shape
        length = self._sequence_length if layer == route.first else kept
        if hidden_BSD.shape[:2] != (batch, length):
            raise ValueError(
                f"kept tokens were drawn for {batch} sequences of {self._sequence_length} tokens, layer {layer} got"
                f" {tuple(hidden_BSD.shape[:2])} and not {(batch, length)}; call draw() before each forward pass"
            )
        if layer > route.first:
            return hidden_BSD
        kept_BKD, rest_BSD = gather_tokens(hidden_BSD, kept_BK)
        self._rest[route] = rest_BSD, torch.is_grad_enabled()
        return kept_BKD

    def rejoin(self, layer: int, out_BKD: Tensor, kept_BK: Tensor) -> Tensor:
        """What a layer hands on: at the last layer of a route all tokens, (B, S, D), else the kept ones.

        Raises:
            ValueError: a reentrant checkpoint around single layers of a route hides the tokens that had left.
        """
        route = self._route_of[layer]
        if layer < route.last:
            return out_BKD
        # that of a single layer goes at once; a checkpoint around the last layer of a span comes here again
        rest_BSD, had_grad = self._rest.pop(route) if layer == route.first else self._rest[route]
        if torch.is_grad_enabled() and not had_grad:
            raise ValueError(
                f"layers {route.first} to {route.last} share their kept tokens, so a reentrant checkpoint around one of"
                " them would lose gradients; want checkpoint(..., use_reentrant=False)"
            )
        return combine_tokens(rest_BSD, out_BKD, kept_BK)

    def side_inputs_of(self, layer: int, sides: Mapping[str, Any], kept_BK: Tensor) -> dict[str, Any]:
        """A layer's inputs beside its hidden states, restricted to the kept tokens."""
        length, known = self._sequence_length, self.side_inputs
        sides = without_cache(sides, layer)
        return {name: restrict(name, side, kept_BK, length, known) for name, side in sides.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to one forward pass: a copy has draws of its own."""
        return {**vars(self), "_kept": {}, "_rest": {}, "_is_drawn": False}


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
        dropping, number = self._dropping, self._layer_number
        kept_BK = dropping.kept(number) if self.training else None
        if kept_BK is None:
            if self.training:
                dropping.warn_if_never_drawn()
            return super().__call__(*args, **kwargs)
        hidden_BSD, sides = _inputs_by_name(type(self), args, kwargs)
        hidden_BKD = dropping.leave(number, hidden_BSD, kept_BK)
        out = super().__call__(hidden_BKD, **dropping.side_inputs_of(number, sides, kept_BK))
        if isinstance(out, tuple):
            return (dropping.rejoin(number, out[0], kept_BK), *out[1:])
        return dropping.rejoin(number, out, kept_BK)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """So that copies and pickles can name the class: it is made when it is needed."""
        return _new_layer, (self.plain_class,), self.__getstate__()


@cache
def dropped_class(plain: type[nn.Module]) -> type[DroppedLayer]:
    """The class of a dropped layer whose own class is `plain`."""
    return type(f"Dropped{plain.__name__}", (DroppedLayer, plain), {"plain_class": plain})


def _new_layer(plain: type[nn.Module]) -> DroppedLayer:
    made = dropped_class(plain)
    return made.__new__(made)


def _length(kept_length: int | Mapping[int, int], route: Route) -> int:
    return operator.index(kept_length[route.first] if isinstance(kept_length, Mapping) else kept_length)


def _always(always: Tensor | Sequence[int], batch: int, length: int) -> Tensor | None:
    """bool (B, S); None where no token always stays."""
    if isinstance(always, Tensor):
        return always.cpu()
    if not len(always):
        return None
    always_BS = torch.zeros(batch, length, dtype=torch.bool)
    always_BS[:, list(always)] = True
    return always_BS


def _inputs_by_name(cls: type[nn.Module], args: Any, kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
    """A layer's hidden states, its first input, and every other input by the name that its forward gives it."""
    names = _positional_names(cls)
    named = dict(zip(names, args, strict=False)) | kwargs
    return named.pop(names[0]), named


@cache
def _positional_names(cls: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
