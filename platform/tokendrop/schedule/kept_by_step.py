"""What stays, as a step function of the optimizer step."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from math import ceil
from typing import Protocol

_AFTER_ALL = 2**62  # a step by which every growth has ended


class KeptByStep(Protocol):
    """What stays, as a step function of the optimizer step; equal ones have equal hashes."""

    def at(self, step: int) -> int:
        """How much stays at `step` (0-based): tokens of each sequence, where nothing else is said."""
        ...

    def next_change(self, step: int) -> int | None:
        """The first step after `step` at which another number stays; None when there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Jumps:
    """A kept length that rises in equal jumps."""

    start: int
    """Tokens kept at step 0."""
    full: int
    """Tokens kept where the growth ends."""
    increment: int
    """Tokens added at each jump; the last jump may be smaller."""
    interval: Fraction
    """Steps between jumps; a fraction where it was given in tokens, so jumps never drift."""

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.full:
            raise ValueError(f"want 0 < start <= full, got start={self.start}, full={self.full}")
        if self.increment < 1:
            raise ValueError(f"want an increment of at least 1 token, got {self.increment}")
        if self.interval <= 0:
            raise ValueError(f"want more than 0 steps between jumps, got {float(self.interval):g}")

    def at(self, step: int) -> int:
        return min(self.full, self.start + self.increment * int(step / self.interval))

    def next_change(self, step: int) -> int | None:
        if self.at(step) == self.full:
            return None
        return ceil((int(step / self.interval) + 1) * self.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Kept lengths given outright: (first step, kept length), both rising."""

    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        starts, lengths = [start for start, _ in self.stages], [kept for _, kept in self.stages]
        if not starts or starts[0] != 0:
            raise ValueError(f"want a first stage at step 0, got stages at {starts}")
        if any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"want stages at rising steps, got {starts}")
        if min(lengths) < 1 or lengths != sorted(lengths):
            raise ValueError(f"want kept lengths of at least 1 that never shrink, got {lengths}")

    def at(self, step: int) -> int:
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage[0]) - 1][1]

    def next_change(self, step: int) -> int | None:
        now = self.at(step)
        return next((start for start, kept in self.stages if start > step and kept != now), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """The kept lengths of a schedule, each rounded to the nearest of a few, up where two are as near."""

    schedule: KeptByStep
    lengths: tuple[int, ...]
    """Those that it is rounded to, rising; what the schedule has at first and in the end are the first and the last."""

    def at(self, step: int) -> int:
        kept = self.schedule.at(step)
        above = bisect_right(self.lengths, kept)
        near = self.lengths[max(above - 1, 0) : above + 1]
        return min(near, key=lambda length: (abs(length - kept), -length))

    def next_change(self, step: int) -> int | None:
        now, change = self.at(step), self.schedule.next_change(step)
        while change is not None and self.at(change) == now:
            change = self.schedule.next_change(change)
        return change


def in_buckets(schedule: KeptByStep, buckets: int) -> KeptByStep:
    """A schedule whose kept length never shrinks, with at most so many different ones, two or more.

    They are spaced evenly between its first and its last one, as whole numbers, halves upwards. A schedule that has no
    more of them stays as it is.
    """
    if sum(1 for _ in islice(_changes(schedule), buckets)) < buckets:
        return schedule
    low, gaps = schedule.at(0), buckets - 1
    above = schedule.at(_AFTER_ALL) - low
    return Rounded(schedule=schedule, lengths=tuple(low + (2 * n * above + gaps) // (2 * gaps) for n in range(buckets)))


def _changes(schedule: KeptByStep) -> Iterator[int]:
    """The steps at which what stays is another."""
    change = schedule.next_change(0)
    while change is not None:
        yield change
        change = schedule.next_change(change)
