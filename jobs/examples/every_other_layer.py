"""A method of one's own: every other layer drops tokens, and recent tokens are more likely to stay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokendrop.config.drop import DropMethod, Span
from tokendrop.method import DrawContext, Uniform


@dataclass(frozen=True)
class RecentFirst:
    """The last tokens of each sequence always stay, as far as there is room; the others are drawn."""

    recent: int

    def select(self, draw: DrawContext, layers: Sequence[int], kept_lengths: Sequence[int]) -> list[Tensor]:
        recent = min(self.recent, *kept_lengths)
        always_S = torch.arange(draw.sequence_length) >= draw.sequence_length - recent
        always_BS = always_S.expand(len(draw.sample_ids_B), draw.sequence_length)
        if draw.always_BS is not None:
            always_BS = always_BS | draw.always_BS
        return Uniform().select(replace(draw, always_BS=always_BS), layers, kept_lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryOtherLayer(DropMethod):
    """Layers 1, 3, 5 ... drop tokens, the last layer left out."""

    recent: int = 4
    """Tokens at the end of each sequence that always stay."""

    def spans(self, layers: int) -> tuple[Span, ...]:
        return tuple((layer, layer) for layer in range(1, layers - 1, 2))

    def selector(self) -> RecentFirst:
        return RecentFirst(self.recent)
