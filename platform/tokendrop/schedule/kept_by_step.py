"""What stays, as a step function of the optimizer step."""

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Protocol


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
