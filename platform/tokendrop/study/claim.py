"""What a sweep is to show, fixed before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That one arm's metric is better than another's, or worse by less than a margin."""

    text: str = ""
    """What is claimed, for people; with its source."""
    arm: Mapping[str, object]
    """Keys of the job, dotted, by whose values the arm is known among those of the sweep."""
    against: Mapping[str, object]
    """The same of the other arm."""
    margin: float = 0.0
    """By how much of the metric the arm may be worse; 0 where it has to be better, below 0 for better by so much."""

    def __post_init__(self) -> None:
        for name, keys in (("arm", self.arm), ("against", self.against)):
            if not keys:
                raise ValueError(f"{name}: want keys of the job with their values, such as drop.method: random_ltd")
        if not isfinite(self.margin):
            raise ValueError(f"margin: want a number, got {self.margin}")
