"""DeepSpeed's schedule of kept lengths, and the schedule of ours that is the same at every step."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_length import Linear

_MOST_STAGES = 10_000  # lines of a job


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLinear:
    """`random_ltd_schedule` of `schedule_type: fixed_linear`.

    Source: `RandomLTDScheduler` of deepspeed/runtime/data_pipeline/data_routing/scheduler.py, DeepSpeed 0.19.8, whose
    floating-point arithmetic this repeats operation by operation.
    """

    least: int
    """`min_value`, tokens."""
    most: int
    """`max_value`, tokens."""
    steps: int
    """`require_steps`."""
    increment: int
    """`seq_per_step`, tokens."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"want 1 <= min_value <= max_value, got {self.least} and {self.most}")
        if (self.most - self.least) // self.increment > _MOST_STAGES:
            raise ValueError(f"want at most {_MOST_STAGES:,} jumps from min_value to max_value; want larger jumps")
        if self.at(0) < 1:
            raise ValueError(
                f"with min_value={self.least} below seq_per_step={self.increment} DeepSpeed keeps no token at first;"
                f" want min_value of at least {self.increment}"
            )

    def at(self, step: int) -> int:
        """Tokens kept at a step, from 0 on."""
        if self.least == self.most:
            return self.most
        share = (float(step) / self.steps) ** (1.0 / 1)
        kept = floor(share * (self.most - self.least) + self.least)
        return min(kept - kept % self.increment, self.most)

    def stages(self) -> tuple[tuple[int, int], ...]:
        """First step and kept length of each stage."""
        found = [(0, self.at(0))]
        while (now := found[-1][1]) < self.most:
            low, span = found[-1][0], 1
            while self.at(low + span) <= now:
                span *= 2
            first = bisect_left(range(low, low + span + 1), True, key=lambda step, now=now: self.at(step) > now) + low
            found.append((first, self.at(first)))
        return tuple(found)


def schedule_of(theirs: FixedLinear) -> tuple[dict[str, Any], bool]:
    """The keys of `drop.schedule` with the same kept length at every step, where `max_value` is the sequence length.

    Returns:
        Them, and whether they are the stages one by one, because no rule of ours has the same ones.
    """
    if theirs.least == theirs.most:
        return {"kind": "constant", "kept": theirs.most}, False
    stages = theirs.stages()
    if _is_linear(theirs, stages):
        steps = f"{theirs.steps} steps"
        return {"kind": "linear", "start": theirs.least, "until": steps, "increment": theirs.increment}, False
    return {"kind": "piecewise", "stages": [{"at": f"{step} steps", "kept": kept} for step, kept in stages]}, True


def _is_linear(theirs: FixedLinear, stages: Sequence[tuple[int, int]]) -> bool:
    """Whether `kind: linear` is the same: both only rise, so they are where each stage begins and ends alike."""
    clock = Clock(global_batch=1, sequence_length=theirs.most, total_steps=theirs.steps)
    until = Duration.parse(f"{theirs.steps} steps")
    ours = Linear(start=theirs.least, until=until, increment=theirs.increment).resolve(clock)
    ends = [step - 1 for step, _ in stages[1:]]
    return all(ours.at(step) == kept for step, kept in stages) and all(
        ours.at(end) == kept for end, (_, kept) in zip(ends, stages[:-1], strict=True)
    )
