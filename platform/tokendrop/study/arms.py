"""What a sweep came to: each arm, a point of its axes, over its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, median, stdev
from typing import Any

from tokendrop.study.sweep import SweepConfig
from tokendrop.study.trials import Point, Trial
from tokendrop.study.verdict import Worse, metric_of, worse_by

AGGREGATES = {"mean": mean, "median": median}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The trials that differ in nothing but their seeds."""

    point: Point
    trials: tuple[Trial, ...]
    by_seed: Mapping[int, float]
    """The metric of those that have ended well."""
    value: float | None
    """Of all of them together; None where there are none, or one of them is no finite number."""

    @property
    def values(self) -> tuple[float, ...]:
        """The metric of those that have ended well, in their order."""
        return tuple(self.by_seed.values())

    @property
    def is_whole(self) -> bool:
        """Whether all of its seeds have ended well: with fewer it can't be compared with others."""
        return len(self.values) == len(self.trials)

    @property
    def is_compared(self) -> bool:
        """Whether it is whole, with a finite metric."""
        return self.is_whole and self.value is not None

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
    done = {trial.config.seed: summaries[trial.run] for trial in trials if trial.run in summaries}
    by_seed = {seed: metric_of(summary, sweep.metric) for seed, summary in done.items()}
    is_known = bool(by_seed) and all(map(isfinite, by_seed.values()))
    value = AGGREGATES[sweep.aggregate](by_seed.values()) if is_known else None
    return Arm(point=trials[0].point, trials=tuple(trials), by_seed=by_seed, value=value)


def best_of(sweep: SweepConfig, arms: Sequence[Arm]) -> Arm | None:
    """The best of the arms whose seeds have all ended well."""
    compared = {arm.value: arm for arm in reversed(arms) if arm.is_compared and arm.value is not None}
    if not compared:
        return None
    return compared[(min if sweep.lower_is_better else max)(compared)]


def worse_than_best(sweep: SweepConfig, arm: Arm, best: Arm | None) -> Worse | None:
    """By how much an arm is worse than the best one, in the mean of pairs of a seed.

    None for that one, where seeds are open, and in a sweep that compares by the median: its best arm may be worse in
    the mean.
    """
    if sweep.aggregate != "mean" or best is None or arm is best or not arm.is_compared:
        return None
    return worse_by(arm.by_seed, best.by_seed, lower=sweep.lower_is_better)
