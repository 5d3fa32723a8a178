"""Kept length by step: how many tokens of each sequence a dropped layer sees.

A schedule is what a job says, with durations in any unit; `resolve` gives its kept lengths by step.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal

from tokendrop.schedule.adaptive import Adaptive
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import Jumps, KeptByStep, Stages


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


Schedule = Mslg | Linear | Root | Constant | Full | Piecewise | Adaptive
