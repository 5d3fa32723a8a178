"""Documents' tokens, end to end, cut into rows of equal length."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class Packer:
    """Rows come out in the order in which tokens go in; where a document begins does not matter."""

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length
        self._waiting: list[NDArray[np.integer]] = []
        self._tokens = 0

    def add(self, tokens_N: NDArray[np.integer]) -> None:
        """Take in more tokens."""
        self._waiting.append(tokens_N)
        self._tokens += len(tokens_N)

    def rows(self, count: int) -> Iterator[NDArray[np.integer]]:
        """All full groups of `count` rows, each (count, row_length)."""
        size = count * self.row_length
        if self._tokens < size:
            return
        tokens_N = np.concatenate(self._waiting)
        full = len(tokens_N) // size * size
        self._waiting, self._tokens = [tokens_N[full:]], len(tokens_N) - full
        yield from tokens_N[:full].reshape(-1, count, self.row_length)

    def rest(self) -> NDArray[np.integer]:
        """The full rows that are left, (rows, row_length); less than a row of tokens is dropped."""
        tokens_N = np.concatenate(self._waiting) if self._waiting else np.empty(0, np.uint16)
        self._waiting, self._tokens = [], 0
        full = len(tokens_N) // self.row_length * self.row_length
        return tokens_N[:full].reshape(-1, self.row_length)
