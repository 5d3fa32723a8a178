"""A kept length that is decided while the run goes, within a budget of layer tokens that is known before."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from math import ceil, inf
from typing import Literal

from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import KeptByStep, Stages

_MOST_DECISIONS = 1_000
_PACES = 1_000_000  # between no growth at all and growth at each decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """At each decision `increment` more tokens or none, by how much dropping changes the loss just then.

    That is the gap: the loss on held-out rows with tokens dropped, less the loss of the same weights on the same rows
    without. A gap below 0 says that the model has learned to do without the others, and does worse with all of
    them, as it will be used; one above 0, that it lacks them. Where it is larger than `grow_above`, whatever its sign,
    the kept length grows; where it is smaller than `hold_below`, it stays; between the two, it does what it did last.

    Whatever is decided, the run spends its budget, to within one jump (`increment` x `every`): growth that could no
    longer be paid for does not take place, and growth without which something would be left over does.

    Yao et al. 2022 name such a schedule as future work (arXiv:2211.11586, appendix "Limitations and Future Work").
    """

    kind: Literal["adaptive"] = "adaptive"
    start: int
    increment: int = 16
    every: Duration = Duration(Fraction(2), "%")
    """Between decisions."""
    budget: float
    """Layer tokens of the dropped layers in the whole run, as a share of those at full length."""
    probe_batches: int = 1
    """Held-out rows that a gap is measured on, in global batches; all of them where there are fewer."""
    grow_above: float = 0.05
    """Nats."""
    hold_below: float = 0.02
    """Nats."""
    decided: tuple[int, ...] = ()
    """Kept lengths of the decisions until now; a run keeps its own. In a job, those that are not to be probed for."""

    def __post_init__(self) -> None:
        for key, value in (("start", self.start), ("increment", self.increment), ("probe_batches", self.probe_batches)):
            if value < 1:
                raise ValueError(f"{key}: want at least 1, got {value}")
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget: want a share above 0 and at most 1, got {self.budget:g}")
        if not 0 <= self.hold_below <= self.grow_above < inf:
            raise ValueError(
                "want hold_below and grow_above, nats, of at least 0, the first of at most the second, got"
                f" {self.hold_below:g} and {self.grow_above:g}"
            )

    def resolve(self, clock: Clock) -> KeptByStep:
        """What is decided, and for the rest even growth that spends the budget.

        Raises:
            ValueError: the budget can't be spent, or what is decided is none of its schedules.
        """
        return self.growth(clock).even_rest().stages

    def growth(self, clock: Clock) -> "Growth":
        """Its arithmetic in a run; raises as `resolve` does."""
        every, steps, full = clock.steps(self.every), clock.total_steps, clock.sequence_length
        if every < 1:
            raise ValueError(f"every: want at least 1 step between decisions, got {self.every}")
        if steps / every > _MOST_DECISIONS:
            raise ValueError(f"every: want at most {_MOST_DECISIONS:,} decisions in a run, got {int(steps / every):,}")
        if self.start > full:
            raise ValueError(f"want a start of at most the full length of {full}, got {self.start}")
        edges = sorted({step for number in range(int(steps / every) + 1) if (step := ceil(number * every)) < steps})
        growth = Growth(
            edges=(*edges, steps),
            after=tuple(accumulate(steps - edge for edge in edges)),
            full=full,
            increment=self.increment,
            tokens=int(Fraction(str(self.budget)) * full * steps),
        )
        least, most = growth.least(0, self.start), growth.most(0, self.start)
        if not least <= growth.tokens <= most:
            raise ValueError(
                f"budget: want {_up(least, full * steps)} to {int(1000 * most / (full * steps)) / 1000:g}, which growth"
                f" from {self.start} by {self.increment} every {self.every} can spend, got {self.budget:g}"
            )
        return growth.with_decided(self.start, self.decided)

    def decisions(self, clock: Clock) -> tuple[int, ...]:
        """The steps at which it is decided, those of the past too."""
        return self.growth(clock).edges[1:-1]

    def next_decision(self, clock: Clock) -> int | None:
        """The step at which it is decided next; None where nothing is left to decide."""
        steps = self.decisions(clock)[len(self.decided) :]
        return steps[0] if steps else None

    def choices(self, clock: Clock) -> tuple[int, int]:
        """The kept lengths that the next decision may set, without growth and with it; equal where it has no choice."""
        growth = self.growth(clock)
        return growth.next(False), growth.next(True)

    def wants(self, gap: float) -> bool:
        """Whether a gap, in nats, is a reason to grow; NaN is one."""
        last, kept = (self.start, self.start, *self.decided)[-2:]
        size = abs(gap)
        return kept > last if self.hold_below <= size <= self.grow_above else not size < self.hold_below

    def always(self, clock: Clock, *, wants: bool) -> "Adaptive":
        """With all of it decided, from now on by growth as early as the budget allows, or as late."""
        growth = self.growth(clock)
        while growth.number < growth.last:
            growth = growth.then(growth.next(wants))
        return replace(self, decided=growth.decided[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The stages of a run between decisions, and what is decided of them; tokens are those of one sequence."""

    edges: tuple[int, ...]
    """The first step of each stage, and the end of the run."""
    after: tuple[int, ...]
    """For each stage: the steps from each stage up to this one to the end of the run, added up."""
    full: int
    increment: int
    tokens: int
    """What there is to spend: the kept lengths of all steps, added up."""
    decided: tuple[int, ...] = ()
    """Kept lengths of the first stages; that of the very first is given."""
    spent: int = 0
    """Tokens of the stages that are decided."""

    @property
    def number(self) -> int:
        """The number of the last stage that is decided."""
        return len(self.decided) - 1

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.edges) - 2

    def then(self, kept: int) -> "Growth":
        """With the next stage decided."""
        steps = self._steps(self.number + 1)
        return replace(self, decided=(*self.decided, kept), spent=self.spent + steps * kept)

    def with_decided(self, start: int, lengths: Sequence[int]) -> "Growth":
        """With the first stage, and those that follow.

        Raises:
            ValueError: these are more lengths than decisions, or others than the budget leaves.
        """
        if len(lengths) > self.last:
            raise ValueError(f"decided: want at most {self.last} kept lengths, got {len(lengths)}")
        growth = self.then(start)
        for number, kept in enumerate(lengths, start=1):
            if kept not in (choices := sorted({growth.next(False), growth.next(True)})):
                raise ValueError(f"decided: want {' or '.join(map(str, choices))} at decision {number}, got {kept}")
            growth = growth.then(kept)
        return growth

    def next(self, wants: bool) -> int:
        """The kept length of the next stage: that which is wanted, where the budget leaves the choice."""
        number, kept = self.number + 1, self.decided[-1]
        grown = self._grown(kept)
        may = self.spent + self.least(number, grown) <= self.tokens
        must = self.spent + self.most(number, kept) < self.tokens
        return grown if may and (wants or must) else kept

    def least(self, number: int, kept: int) -> int:
        """Tokens from stage `number` on, if it keeps so many and nothing grows after it."""
        return kept * (self.edges[-1] - self.edges[number])

    def most(self, number: int, kept: int) -> int:
        """Tokens from stage `number` on, if it keeps so many and each one after it keeps more."""
        jumps, rest = divmod(self.full - kept, self.increment)
        end = min(number + jumps, self.last)
        grown = self.increment * (self.after[end] - self.after[number])
        if end < self.last:  # a smaller jump is the last one
            grown += rest * (self.after[end + 1] - self.after[end])
        return self.least(number, kept) + grown

    def even_rest(self) -> "Growth":
        """With all stages decided: by growth at the largest even pace that the budget pays, and with what is left."""
        begin, kept = self.number, self.decided[-1]
        slow, fast = 0, _PACES + 1
        while fast - slow > 1:
            pace = (slow + fast) // 2
            slow, fast = (pace, fast) if self.spent + self._at_pace(pace) <= self.tokens else (slow, pace)
        growth = self
        while growth.number < growth.last:
            even = kept + self.increment * ((growth.number + 1 - begin) * slow // _PACES)
            growth = growth.then(growth.next(even > growth.decided[-1]))
        return growth

    def _at_pace(self, pace: int) -> int:
        """Tokens of the stages that are not decided, at an even pace."""
        begin, kept = self.number, self.decided[-1]
        return sum(
            self._steps(number) * min(self.full, kept + self.increment * ((number - begin) * pace // _PACES))
            for number in range(begin + 1, self.last + 1)
        )

    @property
    def stages(self) -> Stages:
        """Kept lengths by step, once all stages are decided."""
        return Stages(stages=tuple(zip(self.edges[:-1], self.decided, strict=True)))

    def _grown(self, kept: int) -> int:
        return min(self.full, kept + self.increment)

    def _steps(self, number: int) -> int:
        return self.edges[number + 1] - self.edges[number]


def _up(amount: int, of: int) -> str:
    return f"{ceil(Fraction(1000 * amount, of)) / 1000:g}"
