"""Kept length by step: how many tokens of each sequence a dropped layer sees."""

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Protocol


class KeptLengthSchedule(Protocol):
    """A step function of the optimizer step; it never shrinks."""

    def kept_length(self, step: int) -> int:
        """Tokens that a dropped layer keeps of each sequence at `step` (0-based)."""
        ...

    def next_change(self, step: int) -> int | None:
        """The first step after `step` whose kept length differs; None when there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same kept length at every step; at full length nothing is dropped."""

    kept: int

    def __post_init__(self) -> None:
        if self.kept < 1:
            raise ValueError(f"want a kept length of at least 1, got {self.kept}")

    def kept_length(self, step: int) -> int:
        return self.kept

    def next_change(self, step: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mslg:
    """Monotonic sequence length growth (MSLG): the kept length rises in equal jumps.

    Source: Yao et al. 2022, arXiv:2211.11586, section 3.2.
    """

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

    @classmethod
    def until(cls, *, start: int, full: int, increment: int, steps: Fraction) -> "Mslg":
        """Growth that arrives at `full` after `steps` steps: T_dec = T' / (a_0 / s_dec) (section 3.2)."""
        jumps = ceil(Fraction(full - start, max(increment, 1)))
        return cls(start=start, full=full, increment=increment, interval=steps / max(jumps, 1))

    def kept_length(self, step: int) -> int:
        return min(self.full, self.start + self.increment * int(step / self.interval))

    def next_change(self, step: int) -> int | None:
        if self.kept_length(step) == self.full:
            return None
        return ceil((int(step / self.interval) + 1) * self.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piecewise:
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

    def kept_length(self, step: int) -> int:
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage[0]) - 1][1]

    def next_change(self, step: int) -> int | None:
        now = self.kept_length(step)
        return next((start for start, kept in self.stages if start > step and kept != now), None)
