"""The order of samples: a seeded bijection of row numbers, one for each epoch, with nothing stored."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@np.errstate(over="ignore")  # hashes wrap round
def sample_ids(positions: NDArray[np.int64], *, rows: int, seed: int) -> NDArray[np.int64]:
    """What the run trains on at each position of its global sequence of samples.

    A sample id is `epoch * rows + row`: no two positions share one, and in each epoch every row comes once.

    Args:
        positions: places in the global sequence, counted from 0 over all steps and epochs.
        rows: training rows in the corpus.
    """
    epochs, places = np.divmod(positions.astype(np.int64), rows)
    shuffled = np.empty_like(places)
    run = _mix(np.array([seed % 2**64], np.uint64))
    for epoch in np.unique(epochs):
        here = epochs == epoch
        shuffled[here] = _permute(places[here], rows, key=_mix(run + epoch.astype(np.uint64)))
    return epochs * rows + shuffled


def _permute(places: NDArray[np.int64], size: int, *, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A Feistel network over the next even number of bits, walked until it lands inside 0..size-1.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains" (cycle walking).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(half), key)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: np.uint64, key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mix(right + _mix(key + np.uint64(number))) & mask)
    return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele et al. 2014)."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))
