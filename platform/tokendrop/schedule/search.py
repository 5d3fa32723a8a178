"""A good way through stages of which each offers the same options, under one limit."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from math import inf
from operator import add

Pair = tuple[float, float]
"""What is minimised, and what is limited."""
Stages = Sequence[Sequence[Pair]]
Weights = tuple[float, float]

_SLACK = 1e-9  # relative; what sums of floats may be off by
_ROUNDS = 50  # far more than it takes; a route keeps the limit after any of them


def best_route(stages: Stages, turns: Stages, limit: float | None = None) -> tuple[int, ...] | None:
    """One option a stage, so that the first sums are small and the second ones keep the limit.

    Without a limit, or where the best route of all keeps it, the route is the best: dynamic programming. Else a
    Lagrange multiplier, a price of the second sum, is sought at which a route that keeps the limit and one that does
    not are both the best. The first of them is at most that price times what it leaves of the limit above the best
    route within the limit. That is much where all stages trade one sum for the other at about one rate: so the best
    route within the limit that changes its option once at most is taken instead where it is better.

    Args:
        stages: of each stage, what each option adds.
        turns: what it adds to follow option i by option j.
        limit: of the second sum; None for no limit.
    Returns:
        The options, or None where no route keeps the limit.
    Source: Handler and Zang 1980, Networks 10(4), 293-309 (shortest path under one limit).
    """
    over = _route(stages, turns, (1.0, 0.0))
    if limit is None or total(stages, turns, over)[1] <= limit * (1 + _SLACK):
        return over
    limit *= 1 + _SLACK
    within = _route(stages, turns, (0.0, 1.0))
    if total(stages, turns, within)[1] > limit:
        return None
    for _ in range(_ROUNDS):
        (value_a, limited_a), (value_b, limited_b) = total(stages, turns, over), total(stages, turns, within)
        price = max(0.0, (value_b - value_a) / (limited_a - limited_b))
        route = _route(stages, turns, (1.0, price))
        value, limited = total(stages, turns, route)
        known = value_a + price * limited_a
        if value + price * limited >= known - _SLACK * abs(known):
            break
        over, within = (over, route) if limited <= limit else (route, within)
    once = _changing_once(stages, turns, limit)
    return within if once is None else min(within, once, key=lambda route: total(stages, turns, route)[0])


def _changing_once(stages: Stages, turns: Stages, limit: float) -> tuple[int, ...] | None:
    """The best route within the limit of one option up to some stage and one, the same or another, from there on."""
    options, count = range(len(turns)), len(stages)
    sums = [[*accumulate((stage[option] for stage in stages), _add, initial=(0.0, 0.0))] for option in options]
    best, found = inf, None
    for one, two in product(options, options):
        turn, (value, limited) = (0.0, 0.0) if one == two else turns[one][two], sums[two][count]
        for change in range(1, count) if one != two else (count,):
            before, after = sums[one][change], sums[two][change]
            if before[1] + limited - after[1] + turn[1] > limit or before[0] + value - after[0] + turn[0] >= best:
                continue
            best, found = before[0] + value - after[0] + turn[0], (one,) * change + (two,) * (count - change)
    return found


def total(stages: Stages, turns: Stages, route: Sequence[int]) -> Pair:
    """Both sums along a route."""
    steps = [stage[option] for stage, option in zip(stages, route, strict=True)]
    steps += [turns[one][two] for one, two in pairwise(route)]
    return sum(step[0] for step in steps), sum(step[1] for step in steps)


def _route(stages: Stages, turns: Stages, weights: Weights) -> tuple[int, ...]:
    """The route of the least weighted sum; it keeps its option where it may."""
    rows = [[_weigh(pair, weights) for pair in row] for row in turns]
    to_end: list[list[float]] = [[0.0] * len(turns)]  # of each option, the least sum from its stage to the last one
    for stage in reversed(stages):
        after = [min(map(add, row, to_end[-1])) for row in rows] if len(to_end) > 1 else to_end[0]
        to_end.append([_weigh(pair, weights) + rest for pair, rest in zip(stage, after, strict=True)])
    first, *later = to_end[:0:-1]
    route = [first.index(min(first))]
    for stage in later:
        sums = [*map(add, rows[route[-1]], stage)]
        least = min(sums)
        route.append(route[-1] if sums[route[-1]] == least else sums.index(least))
    return tuple(route)


def _add(one: Pair, two: Pair) -> Pair:
    return one[0] + two[0], one[1] + two[1]


def _weigh(pair: Pair, weights: Weights) -> float:
    return pair[0] * weights[0] + pair[1] * weights[1]
