"""The loss against what it cost: a power law through the budgets of an arm."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, log
from typing import Any

from tokendrop.study.arms import Arm
from tokendrop.study.budget import BUDGET
from tokendrop.study.trials import Point

_LEAST, _COVERAGE = 3, 0.95


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """metric = factor x cost ^ exponent, by least squares of the logarithms."""

    factor: float
    exponent: float
    low: float
    """Where the 95% interval of the exponent begins, by Student's t over the budgets."""
    high: float


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """One point of the axes over all budgets."""

    point: Point
    """Without the budget."""
    costs: tuple[float, ...]
    values: tuple[float, ...]
    """The metric at each cost."""
    law: PowerLaw | None
    """None with fewer than three budgets that all seeds came to the end of, or with a metric that is not above 0."""


def frontiers(arms: Sequence[Arm]) -> list[Frontier]:
    """Of all arms, in order; arms that are not whole are left out."""
    found: list[Frontier] = []
    ordered = sorted(((_bare(arm.point), arm) for arm in arms), key=lambda one: repr(one[0]))
    for _, group in groupby(ordered, key=lambda one: repr(one[0])):
        pairs = [*group]
        whole = sorted((_budget(arm), arm.value) for _, arm in pairs if arm.is_whole and arm.value is not None)
        costs, values = tuple(cost for cost, _ in whole), tuple(value for _, value in whole)
        found.append(Frontier(point=pairs[0][0], costs=costs, values=values, law=fit(costs, values)))
    order = [repr(_bare(arm.point)) for arm in arms]
    return sorted(found, key=lambda one: order.index(repr(one.point)))


def _budget(arm: Arm) -> float:
    amount = dict(arm.point)[BUDGET]
    assert isinstance(amount, int | float)
    return amount


def _bare(point: Point) -> Point:
    return tuple((key, value) for key, value in point if key != BUDGET)


def fit(costs: Sequence[float], values: Sequence[float]) -> PowerLaw | None:
    """The power law through the points; None where there are fewer than three, or values that are not above 0."""
    if len(costs) < _LEAST or min(values) <= 0:
        return None
    from scipy import stats

    line: Any = stats.linregress([log(cost) for cost in costs], [log(value) for value in values])
    error = 0.0 if min(values) == max(values) else float(line.stderr)  # scipy has no error of a line that is level
    wide = float(stats.t.ppf((1 + _COVERAGE) / 2, len(costs) - 2)) * error
    exponent = float(line.slope)
    return PowerLaw(factor=exp(float(line.intercept)), exponent=exponent, low=exponent - wide, high=exponent + wide)
