"""Texts that begin alike as one row, so that what they share is computed once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

# Dimensions: B rows of a batch, S tokens of its longest row.

Tokens = tuple[int, ...]

_WORTH = 7 / 8  # a row is joined where it has fewer of its texts' tokens than this; its attention costs more
_PADDING = -1


@dataclass(frozen=True, slots=True)
class Row:
    """What its texts begin with, then what each of them goes on with."""

    texts: tuple[Tokens, ...]
    shared: int
    """Tokens that all texts begin with; of a text by itself, all of them."""

    def __len__(self) -> int:
        return self.shared + sum(len(text) - self.shared for text in self.texts)

    @property
    def tokens(self) -> Tokens:
        """Those of the row."""
        return self.texts[0][: self.shared] + tuple(chain.from_iterable(text[self.shared :] for text in self.texts))

    @property
    def positions(self) -> list[int]:
        """Of each token in its own text."""
        own = (range(self.shared, len(text)) for text in self.texts)
        return [*range(self.shared), *chain.from_iterable(own)]

    @property
    def branches(self) -> list[int]:
        """0 for what is shared; for other tokens the number of their text, from 1."""
        own = ([number] * (len(text) - self.shared) for number, text in enumerate(self.texts, 1))
        return [*[0] * self.shared, *chain.from_iterable(own)]

    def last(self, text: int, count: int) -> list[int]:
        """Where the last tokens of a text are in the row."""
        length = len(self.texts[text])
        before = sum(len(one) - self.shared for one in self.texts[:text])
        return [place if place < self.shared else place + before for place in range(length - count, length)]


def joined(texts: Iterable[Tokens], longest: int) -> list[Row]:
    """Texts as rows: neighbours in the order of their tokens share one where that saves an eighth of them.

    Args:
        longest: tokens that a row with several texts has at most.
    """
    rows: list[Row] = []
    for text in sorted(texts):
        alone = Row((text,), len(text))
        last = rows[-1] if rows else alone
        both = Row((*last.texts, text), min(last.shared, common(last.texts[0], text)))
        if rows and len(both) <= min(longest, _WORTH * (len(last) + len(text))):
            rows[-1] = both
        else:
            rows.append(alone)
    return rows


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def padded(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Tensor:
    """Rows of numbers as one tensor (B, S), filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], device=device)


def as_inputs(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (B, S), positions (B, S) and which tokens each one attends to (B, S, S)."""
    branches_BS = padded([row.branches for row in rows], _PADDING, device)
    is_shared_B1S = (branches_BS == 0)[:, None]
    sees_BSS = (is_shared_B1S | (branches_BS[:, :, None] == branches_BS[:, None])).tril()
    ids_BS = padded([row.tokens for row in rows], 0, device)
    return ids_BS, padded([row.positions for row in rows], 0, device), sees_BSS
