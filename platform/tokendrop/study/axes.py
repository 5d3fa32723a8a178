"""What a sweep varies: the values of one key of the job, all of them or drawn."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BaseAxis(ABC):
    """What every axis has."""

    kind: str
    when: Mapping[str, object] = field(default_factory=dict)
    """Keys of the job, each with a value or a list of values: the axis is there only where the job has them, by what
    its files say and by the axes before this one."""

    @property
    def is_drawn(self) -> bool:
        """Whether each sample has one value, drawn; else there is a trial for every value."""
        return True

    @abstractmethod
    def values_for(self, chance: Random) -> Sequence[object]:
        """The values of one sample; the only one where it is drawn."""


@dataclass(frozen=True, kw_only=True)
class _Values(BaseAxis):
    """What both kinds with a list of values have."""

    values: tuple[object, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values: want at least one value")


@dataclass(frozen=True, kw_only=True)
class Grid(_Values):
    """Every value; in the file, a plain list will do."""

    kind: Literal["grid"] = "grid"

    @property
    def is_drawn(self) -> bool:
        return False

    def values_for(self, chance: Random) -> Sequence[object]:
        return self.values


@dataclass(frozen=True, kw_only=True)
class Choice(_Values):
    """One of several values, all as likely."""

    kind: Literal["choice"] = "choice"

    def values_for(self, chance: Random) -> Sequence[object]:
        return [chance.choice(self.values)]


@dataclass(frozen=True, kw_only=True)
class _Between(BaseAxis):
    low: float
    high: float
    multiple_of: float | None = None
    """Values are rounded to a multiple of this; 1 for whole numbers."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"high: want more than low, {self.low:g}, got {self.high:g}")
        if self.multiple_of is None:
            return
        if self.multiple_of <= 0:
            raise ValueError(f"multiple_of: want a number above 0, got {self.multiple_of:g}")
        if self.rounded(self.low) < self.low or self.rounded(self.high) > self.high:
            raise ValueError(f"multiple_of: want low and high as multiples of it, {self.multiple_of:g}")

    def rounded(self, value: float) -> float | int:
        """The multiple of `multiple_of` next to a value."""
        if self.multiple_of is None:
            return value
        unit = Fraction(str(self.multiple_of))  # as it is written: three times 0.1 is 0.3
        rounded = round(Fraction(str(value)) / unit) * unit
        return int(rounded) if rounded.denominator == 1 else float(rounded)


@dataclass(frozen=True, kw_only=True)
class Uniform(_Between):
    """A number between two, all as likely."""

    kind: Literal["uniform"] = "uniform"

    def values_for(self, chance: Random) -> Sequence[object]:
        return [self.rounded(chance.uniform(self.low, self.high))]


@dataclass(frozen=True, kw_only=True)
class LogUniform(_Between):
    """A number between two, whose logarithm is as likely anywhere: for learning rates."""

    kind: Literal["log_uniform"] = "log_uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise ValueError(f"low: want a number above 0, got {self.low:g}")

    def values_for(self, chance: Random) -> Sequence[object]:
        return [self.rounded(math.exp(chance.uniform(math.log(self.low), math.log(self.high))))]


Axis = Grid | Choice | Uniform | LogUniform
