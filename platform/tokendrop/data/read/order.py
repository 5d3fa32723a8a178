"""The order of samples: arithmetic on positions, with nothing stored.

A sample id says which row of which source, and in which epoch of that source: `rounds << ROW_BITS | row`, where
rounds = epoch * sources + source. So no two positions of a run share an id, an id tells its row without knowing how
many rows there are, and in the first epoch of a single source it is the row's number.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tokendrop.data.shards.format import Committed

ROW_BITS = 36
_PERIOD = 4096
_ROUNDS = 6
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class NotPreparedError(Exception):
    """A position lies in rows that are not committed yet."""


def rows_of(sample_ids: NDArray[np.int64], *, sources: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source and the row of each sample."""
    return (sample_ids >> ROW_BITS) % sources, sample_ids & ((1 << ROW_BITS) - 1)


def first_ids(source: int, count: int) -> NDArray[np.int64]:
    """Sample ids of a source's first rows, in its first epoch."""
    return source << ROW_BITS | np.arange(count, dtype=np.int64)


class SampleOrder:
    """What a run trains on at each position of its global sequence of samples.

    Sources take turns by their weights, exactly so in every 4096 positions. Each epoch of a source is a permutation
    of its rows. In the first epoch rows are permuted within windows of `window` rows, so the order of the first
    windows does not depend on what comes after them, nor on when it is prepared; in later epochs, all over.
    """

    def __init__(self, *, seed: int, weights: Sequence[float], window: int) -> None:
        """
        Args:
            weights: of the sources, above 0; relative to their sum.
            window: rows; 0 for one window over all.
        """
        self.window = window
        self._key = _mix(np.array([seed % 2**64], np.uint64))
        self._turns = _shares(weights)
        self._last: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def sample_ids(self, positions: NDArray[np.int64], committed: Committed) -> NDArray[np.int64]:
        """Sample ids at positions, counted from 0 over all steps and epochs.

        Raises:
            NotPreparedError: preparation has to go on before one of them is known.
        """
        ids = np.empty(len(positions), np.int64)
        sources, places = self._turn_of(positions.astype(np.int64))
        for source in np.unique(sources):
            here = sources == source
            ids[here] = self._within(int(source), places[here], committed)
        return ids

    def _turn_of(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source whose turn it is at each position, and how many turns it had before."""
        sources, turns = np.zeros_like(positions), positions.copy()
        if len(self._turns) > 1:
            periods, places = np.divmod(positions, _PERIOD)
            for period, here in _groups(periods):
                all_sources, all_turns = self._period(period)
                sources[here], turns[here] = all_sources[places[here]], all_turns[places[here]]
        return sources, turns

    def _period(self, period: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`_turn_of` for all positions of a period; the last one is kept."""
        if self._last is None or self._last[0] != period:
            slots = _permute(np.arange(_PERIOD), _PERIOD, key=_mix(self._key ^ np.uint64(period)))
            sources = np.searchsorted(np.cumsum(self._turns), slots, side="right")
            turns = np.empty_like(sources)
            for source, count in enumerate(self._turns):
                turns[sources == source] = period * count + np.arange(count)
            self._last = period, sources, turns
        return self._last[1:]

    def _within(self, source: int, places: NDArray[np.int64], committed: Committed) -> NDArray[np.int64]:
        """Sample ids of one source at places of its own sequence."""
        rows, window = committed.rows[source], self.window
        if not committed.is_complete and not (window and (places.max() // window + 1) * window <= rows):
            raise NotPreparedError
        assert rows > 0, "a source without rows"
        ids = np.empty_like(places)
        first = places < rows if committed.is_complete else np.ones(len(places), bool)
        epochs, inside = np.divmod(places, rows)
        windows = np.where(first & bool(window), inside // max(1, window), 0)
        rounds = epochs * len(self._turns) + source
        for key, here in _groups(rounds << ROW_BITS | windows):
            start = int(windows[here][0]) * window
            size = min(window, rows - start) if window and first[here][0] else rows
            run = _mix(_mix(self._key + np.uint64(1)) + np.uint64(key))
            row = start + _permute(inside[here] - start, size, key=run)
            ids[here] = rounds[here] << ROW_BITS | row
        return ids


def _groups(values: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    for value in np.unique(values):
        yield int(value), values == value


def _shares(weights: Sequence[float]) -> list[int]:
    """The turns of each source in a period: by its weight, and at least one."""
    exact = [max(1.0, weight / sum(weights) * _PERIOD) for weight in weights]
    exact = [share / sum(exact) * _PERIOD for share in exact]
    turns = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(turns)), key=lambda source: turns[source] - exact[source])
    for source in by_remainder[: max(0, _PERIOD - sum(turns))]:
        turns[source] += 1
    turns[turns.index(max(turns))] += _PERIOD - sum(turns)
    return turns


@np.errstate(over="ignore")  # hashes wrap round
def _permute(places: NDArray[np.int64], size: int, *, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A bijection of 0..size-1: a Feistel network over the next number of bits, walked until it lands inside.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains" (cycle walking).
    """
    bits = max(2, (size - 1).bit_length())
    keys = [_mix(key + np.uint64(number)) for number in range(_ROUNDS)]
    values = places.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        walked = _feistel(values[outside], bits, keys)
        values[outside] = walked
        outside = outside[walked >= size]
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Rounds change the low half and the high half in turn; halves of an odd number of bits differ by one."""
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    low_mask, high_mask = (np.uint64(1) << low_bits) - np.uint64(1), (np.uint64(1) << high_bits) - np.uint64(1)
    high, low = values >> low_bits, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_mix(low + key) & high_mask)
        else:
            low = low ^ (_mix(high + key) & low_mask)
    return high << low_bits | low


@np.errstate(over="ignore")
def hashed(*address: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Random bits that are a function of their address, which is numbers; arrays are broadcast."""
    bits = np.zeros((), np.uint64)
    for part in address:
        bits = _mix(bits ^ (np.uint64(part % 2**64) if isinstance(part, int) else part.astype(np.uint64)))
    return bits


def uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Random bits as numbers from 0 up to, not including, 1."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@np.errstate(over="ignore")
def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele et al. 2014)."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))
