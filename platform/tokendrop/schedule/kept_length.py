"""Kept length by step: how many tokens of each sequence a dropped layer sees.

A schedule is what a job says, with durations in any unit; `resolve` gives its kept lengths by step.
"""

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Literal, Protocol

from tokendrop.schedule.duration import Clock, Duration


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
class Mslg:
    """Monotonic sequence length growth, as the paper writes it: `increment` more tokens every so often.

    Source: Yao et al. 2022, arXiv:2211.11586, section 3.2.
    """

    kind: Literal["mslg"] = "mslg"
    start: int
    increment: int
    every: Duration
    """Between jumps, such as `1.75e9 tokens` or `350 steps`."""
    full: int | None = None
    """Kept length where the growth ends; the sequence length when left out."""

    def resolve(self, clock: Clock) -> KeptByStep:
        """Its kept lengths by step."""
        full = clock.sequence_length if self.full is None else self.full
        return Jumps(start=self.start, full=full, increment=self.increment, interval=clock.steps(self.every))


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Growth in equal jumps that reaches the full length at `until`, such as `70%` of the run."""

    kind: Literal["linear"] = "linear"
    start: int
    until: Duration
    increment: int = 16

    def resolve(self, clock: Clock) -> KeptByStep:
        """Jumps T_dec = T' / (a_0 / s_dec) steps apart (section 3.2)."""
        full = clock.sequence_length
        jumps = ceil(Fraction(full - self.start, max(self.increment, 1)))
        interval = clock.steps(self.until) / max(jumps, 1)
        return Jumps(start=self.start, full=full, increment=self.increment, interval=interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Growth that begins fast and slows down: (step / until) ** (1 / degree) of the way, in equal jumps.

    Source: the `fixed_root` schedule of DeepSpeed's curriculum learning (Li et al. 2022, arXiv:2108.06084).
    """

    kind: Literal["root"] = "root"
    start: int
    until: Duration
    increment: int = 16
    degree: int = 2
    """1 for even growth."""

    def __post_init__(self) -> None:
        if not 1 <= self.degree <= 100:
            raise ValueError(f"degree: want 1 to 100, got {self.degree}")
        if min(self.start, self.increment) < 1:
            raise ValueError(f"want a start and an increment of at least 1, got {self.start} and {self.increment}")

    def resolve(self, clock: Clock) -> KeptByStep:
        """Each jump at the first step where the growth has come that far.

        Raises:
            ValueError: it starts at the full length or above, or ends before it begins.
        """
        full, until = clock.sequence_length, clock.steps(self.until)
        if self.start >= full:
            raise ValueError(f"want a start below the full length of {full}, got {self.start}")
        if until <= 0:
            raise ValueError(f"want an end after step 0, got {self.until}")
        lengths = [*range(self.start + self.increment, full, self.increment), full]
        at = {ceil(until * Fraction(kept - self.start, full - self.start) ** self.degree): kept for kept in lengths}
        return Stages(stages=((0, self.start), *at.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One kept length for the whole run; at full length nothing is dropped."""

    kind: Literal["constant"] = "constant"
    kept: int

    def __post_init__(self) -> None:
        if self.kept < 1:
            raise ValueError(f"want a kept length of at least 1, got {self.kept}")

    def resolve(self, clock: Clock) -> KeptByStep:
        """Its kept lengths by step."""
        return self

    def at(self, step: int) -> int:
        return self.kept

    def next_change(self, step: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Nothing is dropped."""

    kind: Literal["full"] = "full"

    def resolve(self, clock: Clock) -> KeptByStep:
        """Its kept lengths by step."""
        return Constant(kept=clock.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From `at` on, keep `kept` tokens."""

    at: Duration
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piecewise:
    """Kept lengths given outright, stage by stage."""

    kind: Literal["piecewise"] = "piecewise"
    stages: tuple[Stage, ...]

    def resolve(self, clock: Clock) -> KeptByStep:
        """Its kept lengths by step."""
        return Stages(stages=tuple((round(clock.steps(stage.at)), stage.kept) for stage in self.stages))


Schedule = Mslg | Linear | Root | Constant | Full | Piecewise
