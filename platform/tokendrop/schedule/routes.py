"""Where a run drops, and what stays there step by step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tokendrop.schedule.kept_by_step import KeptByStep

Span = tuple[int, int]
"""Numbers, from 0, of the first and the last layer that is passed by."""
Counts = Literal["tokens", "sequences"]
"""What stays is counted in: tokens of each sequence, or sequences of the global batch."""
_MOST_SEGMENTS = 50_000  # some seconds to lay out


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSchedule:
    """A span of layers, and what stays in it."""

    span: Span
    kept: KeptByStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The spans of a run, apart and in order."""

    spans: tuple[Span, ...] = ()
    counts: Counts = "tokens"
    learned: bool = False
    """Whether a linear map of each token to one number, before each span, chooses who stays."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that don't see everything."""
        return tuple(layer for first, last in self.spans for layer in range(first, last + 1))


def stages(schedules: Sequence[KeptByStep], steps: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The stages of a run: one begins wherever what stays changes in any of the schedules.

    Returns:
        Of each stage its first step, the step after its last one, and what stays by each schedule.
    """
    kept = [schedule.at(0) for schedule in schedules]
    changes = [schedule.next_change(0) for schedule in schedules]
    start = 0
    while start < steps:
        stop = min([steps, *(change for change in changes if change is not None)])
        yield start, stop, tuple(kept)
        for number, schedule in enumerate(schedules):
            if changes[number] == stop:
                kept[number], changes[number] = schedule.at(stop), schedule.next_change(stop)
        start = stop


def check_countable(schedules: Sequence[KeptByStep], steps: int) -> None:
    """Raises ValueError where a run would have more stages than can be laid out in some seconds."""
    if sum(1 for _ in islice(stages(schedules, steps), _MOST_SEGMENTS + 1)) > _MOST_SEGMENTS:
        raise ValueError(
            f"want at most {_MOST_SEGMENTS:,} changes in a run of what layers keep; want larger jumps, or where whole"
            " sequences are dropped, a smaller global batch"
        )
