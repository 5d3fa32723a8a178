"""What a sweep came to: each arm, a point of its axes, over its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, median, stdev
from typing import Any

from tokendrop.study.sweep import SweepConfig
from tokendrop.study.trials import Point, Trial

AGGREGATES = {"mean": mean, "median": median}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The trials that differ in nothing but their seeds."""

    point: Point
    trials: tuple[Trial, ...]
    values: tuple[float, ...]
    """The metric of those that have ended well."""
    value: float | None
    """Of all of them together; None where there are none, or one of them is no finite number."""

    @property
    def is_whole(self) -> bool:
        """Whether all of its seeds have ended well: with fewer it can't be compared with others."""
        return len(self.values) == len(self.trials)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None with fewer than two."""
        return stdev(self.values) if len(self.values) > 1 and self.value is not None else None


def arms_of(sweep: SweepConfig, trials: Sequence[Trial], summaries: Mapping[str, Mapping[str, Any]]) -> list[Arm]:
    """The arms of a sweep, in the order of its axes."""
    grouped: dict[str, list[Trial]] = {}
    for trial in trials:
        grouped.setdefault(repr(trial.point), []).append(trial)
    return [_arm(sweep, one, summaries) for one in grouped.values()]


def _arm(sweep: SweepConfig, trials: Sequence[Trial], summaries: Mapping[str, Mapping[str, Any]]) -> Arm:
    found = [summaries[trial.run][sweep.metric] for trial in trials if trial.run in summaries]
    values = tuple(float(value) if isinstance(value, int | float) else float("nan") for value in found)
    is_known = bool(values) and all(map(isfinite, values))
    value = AGGREGATES[sweep.aggregate](values) if is_known else None
    return Arm(point=trials[0].point, trials=tuple(trials), values=values, value=value)


def best_of(sweep: SweepConfig, arms: Sequence[Arm]) -> Arm | None:
    """The best of the arms whose seeds have all ended well."""
    compared = {arm.value: arm for arm in reversed(arms) if arm.is_whole and arm.value is not None}
    if not compared:
        return None
    return compared[(min if sweep.lower_is_better else max)(compared)]
