"""Which steps are traced."""

import re
from dataclasses import dataclass

_MOST_TRACED = 100  # steps; each of them takes megabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSteps:
    """Steps that torch's profiler follows on rank 0."""

    steps: str
    """The first and the last of them, counted from 1: `20..25`."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"[0-9]{1,15}\.\.[0-9]{1,15}", self.steps) is None:
            raise ValueError(f"steps: want the first and the last step, such as 20..25, got {self.steps!r}")
        if not 1 <= self.first <= self.last < self.first + _MOST_TRACED:
            raise ValueError(f"steps: want at most {_MOST_TRACED} steps, from 1 on and in order, got {self.steps!r}")

    @property
    def first(self) -> int:
        """The first step that is traced, counted from 1."""
        return int(self.steps.partition("..")[0])

    @property
    def last(self) -> int:
        """The last step that is traced, counted from 1."""
        return int(self.steps.partition("..")[2])
