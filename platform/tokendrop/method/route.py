"""Which tokens leave the stream, where, and who chooses them: every method of dropping is a set of routes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokendrop.method.draw import DrawContext, check_lengths, draw_positions, position_hashes
from tokendrop.method.side_inputs import TokenDims

# Dimensions: B micro batch, S sequence, K kept length, D width.


class RunsLayer(Protocol):
    """What a selector gives for a route of single layers where positions, known beforehand, do not say it all."""

    def run(self, layer: Callable[..., Any], hidden_BSD: Tensor, sides: Mapping[str, Any], known: TokenDims) -> Any:
        """The layer's output, in which what passes it by is as in its input.

        Args:
            layer: takes hidden states and side inputs by their names.
            sides: of all tokens.
            known: along which dimensions of a side input its tokens lie.
        """
        ...


class Selector(Protocol):
    """Chooses who stays: a pure function of its arguments and of what a checkpoint holds; so at any world size.

    One that is a module belongs to the model: see `LearnedRouter`.
    """

    def select(self, draw: DrawContext, layers: Sequence[int], kept_lengths: Sequence[int], /) -> Sequence[Any]:
        """Choose for several routes at once.

        Args:
            layers: the first layer of each route, which tells its draw from the others'.
            kept_lengths: tokens that stay in each, 1..sequence_length.
        Returns:
            For each route the kept positions, int64 (B, K), ascending along K; or a `RunsLayer`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every token is as likely to stay as any other (Yao et al. 2022, section 3.1)."""

    def select(self, draw: DrawContext, layers: Sequence[int], kept_lengths: Sequence[int]) -> list[Tensor]:
        return draw_positions(draw, layers, kept_lengths)


@dataclass(frozen=True, slots=True)
class HighestScore:
    """The tokens of the highest scores stay; of equal scores, those of the smallest hashes (Hou et al. 2022)."""

    def select(self, draw: DrawContext, layers: Sequence[int], kept_lengths: Sequence[int]) -> list[Tensor]:
        if draw.scores_BS is None:
            raise ValueError("draw: routes that keep the highest scores want scores_BS, one of each token")
        check_lengths(kept_lengths, draw.sequence_length, draw.always_BS)
        scores_BS = draw.scores_BS.to(draw.device)
        if draw.always_BS is not None:
            scores_BS = scores_BS.masked_fill(draw.always_BS.to(draw.device), torch.inf)
        hash_LBS = position_hashes(draw, layers)
        by_hash_LBS = hash_LBS.argsort(dim=-1)
        in_hash_order_LBS = scores_BS.expand_as(hash_LBS).gather(-1, by_hash_LBS)
        by_score_LBS = torch.argsort(in_hash_order_LBS, dim=-1, descending=True, stable=True)
        order_LBS = by_hash_LBS.gather(-1, by_score_LBS)
        return [order_BS[:, :kept].sort(-1).values for order_BS, kept in zip(order_LBS, kept_lengths, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A span of layers that some tokens pass by: they leave before `first` and rejoin, unchanged, after `last`."""

    first: int
    """Number of a layer from 0, or from the end when negative."""
    last: int
    select: Selector = Uniform()

    def within(self, layers: int) -> "Route":
        """The same route with numbers from 0.

        Raises:
            ValueError: it lies outside of a model of so many layers.
        """
        inside = all(-layers <= number < layers for number in (self.first, self.last))
        first, last = self.first % layers, self.last % layers
        if not inside or first > last:
            raise ValueError(f"routes: want first <= last of {layers} layers, got {self.first} and {self.last}")
        return Route(first=first, last=last, select=self.select)


def routes_along(spans: Iterable[tuple[int, int]], select: Selector | None = None) -> list[Route]:
    """A route for each (first layer, last layer), with a draw of its own; random-LTD has one for each layer.

    Args:
        select: who stays; a uniform draw when left out.
    """
    return [Route(first=first, last=last, select=select or Uniform()) for first, last in spans]


def check_apart(routes: Sequence[Route]) -> None:
    """Raises ValueError where two routes, numbered from 0, share a layer."""
    taken: set[int] = set()
    for route in routes:
        span = set(range(route.first, route.last + 1))
        if shared := sorted(span & taken):
            raise ValueError(f"routes: layer {shared[0]} is in two of them; want each layer in one at most")
        taken |= span
