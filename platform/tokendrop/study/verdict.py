"""Whether a sweep bears its claim out: two arms, paired by seed, against a margin that was fixed beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from statistics import fmean, stdev
from typing import Any, Literal

from tokendrop.study.claim import Claim
from tokendrop.study.trials import Trial, trials_with

_COVERAGE = 0.95
_MOST_SEEDS = 100_000

Answer = Literal["agrees", "disagrees", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Worse:
    """By how much of the metric an arm is worse than another, over the seeds that both have."""

    mean: float
    """Above 0 where the arm is worse."""
    low: float | None
    """Where the 95% interval of the mean begins, by Student's t over the pairs; None with one of them."""
    high: float | None
    seeds: int


def worse_by(arm: Mapping[int, float], other: Mapping[int, float], *, lower: bool) -> Worse | None:
    """By how much an arm is worse; None where no seed is in both.

    Args:
        arm, other: the metric by seed, finite.
        lower: whether a lower metric is better.
    """
    differences = _differences(arm, other, lower=lower)
    if not differences:
        return None
    seeds, mean = len(differences), fmean(differences)
    if seeds == 1:
        return Worse(mean=mean, low=None, high=None, seeds=seeds)
    wide = _wide(stdev(differences), seeds)
    return Worse(mean=mean, low=mean - wide, high=mean + wide, seeds=seeds)


def _differences(arm: Mapping[int, float], other: Mapping[int, float], *, lower: bool) -> list[float]:
    return [(arm[seed] - other[seed]) * (1 if lower else -1) for seed in sorted(arm.keys() & other.keys())]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the paired differences say of a claim; above 0 the arm is worse."""

    answer: Answer
    mean: float
    low: float
    """Where the 95% interval of the mean begins, by Student's t over the seeds."""
    high: float
    spread: float
    """The standard deviation of the differences over seeds; NaN where one is no finite number, as of a run that
    diverged: the claim is undecided then."""
    seeds: int
    seeds_to_decide: int | None
    """About how many seeds would decide, if the differences go on as they are; None where it is decided, or no number
    of them would do."""


def metric_of(summary: Mapping[str, Any], metric: str) -> float:
    """A trial's metric; NaN where it has none."""
    value = summary.get(metric)
    return float(value) if isinstance(value, int | float) else nan


def judged(
    claim: Claim, trials: Sequence[Trial], summaries: Mapping[str, Mapping[str, Any]], metric: str, *, lower: bool
) -> Verdict | None:
    """The verdict of a sweep; None as long as fewer than two seeds of both arms have ended well.

    Args:
        summaries: of the trials that have ended well, by their runs.
        lower: whether a lower metric is better.
    """
    arms = [
        {trial.config.seed: metric_of(summaries[trial.run], metric) for trial in found if trial.run in summaries}
        for found in (trials_with(trials, claim.arm, "arm"), trials_with(trials, claim.against, "against"))
    ]
    differences = _differences(arms[0], arms[1], lower=lower)
    return verdict(differences, claim.margin) if len(differences) > 1 else None


def verdict(differences: Sequence[float], margin: float) -> Verdict:
    """What differences, one of each seed, say of the claim that their mean is below a margin.

    Args:
        differences: two or more; above 0 where the arm is worse.
    """
    seeds, mean = len(differences), fmean(differences)
    spread = stdev(differences) if all(map(isfinite, differences)) else nan
    wide = _wide(spread, seeds)
    low, high = mean - wide, mean + wide
    answer: Answer = "agrees" if high < margin else "disagrees" if low > margin else "undecided"
    more = _seeds_to_decide(spread, abs(mean - margin), begin=seeds) if answer == "undecided" else None
    return Verdict(answer=answer, mean=mean, low=low, high=high, spread=spread, seeds=seeds, seeds_to_decide=more)


def _wide(spread: float, seeds: int) -> float:
    """Half of the interval of a mean."""
    from scipy import stats

    return float(stats.t.ppf((1 + _COVERAGE) / 2, seeds - 1)) * spread / seeds**0.5 if isfinite(spread) else inf


def _seeds_to_decide(spread: float, distance: float, *, begin: int) -> int | None:
    if not isfinite(spread) or _wide(spread, _MOST_SEEDS) >= distance:
        return None
    low, high = begin, _MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _wide(spread, middle) < distance else (middle, high)
    return high
