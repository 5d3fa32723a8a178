"""The best way through stages of which each offers the same options: exact, under one limit."""

from collections.abc import Sequence
from itertools import pairwise
from operator import add

Pair = tuple[float, float]
"""What is minimised, and what is limited."""
Stages = Sequence[Sequence[Pair]]
Weights = tuple[float, float]
Label = tuple[float, float, tuple[int, "Label"] | None]

_SLACK = 1e-9  # relative; what sums of floats may be off by
_ROUNDS = 50  # far more than it takes; any multiplier gives a bound


def best_route(stages: Stages, turns: Stages, limit: float | None = None) -> tuple[int, ...] | None:
    """One option a stage, so that the first sums are least and the second ones keep the limit.

    Lagrange multipliers first: they give a route that keeps the limit and a bound on what every other one can reach.
    Then labels, stage by stage, without those that another beats in both sums or that the bound rules out.

    Args:
        stages: of each stage, what each option adds.
        turns: what it adds to follow option i by option j.
        limit: of the second sum; None for no limit.
    Returns:
        The options, or None where no route keeps the limit.
    """
    cheap = _route(stages, turns, (1.0, 0.0))
    if limit is None or total(stages, turns, cheap)[1] <= limit * (1 + _SLACK):
        return cheap
    limit *= 1 + _SLACK
    short = _route(stages, turns, (0.0, 1.0))
    if total(stages, turns, short)[1] > limit:
        return None
    multiplier, known = _multiplier(stages, turns, limit, cheap, short)
    return _improved(stages, turns, limit, multiplier, known)


def total(stages: Stages, turns: Stages, route: Sequence[int]) -> Pair:
    """Both sums along a route."""
    steps = [stage[option] for stage, option in zip(stages, route, strict=True)]
    steps += [turns[one][two] for one, two in pairwise(route)]
    return sum(step[0] for step in steps), sum(step[1] for step in steps)


def _to_go(stages: Stages, turns: Stages, weights: Weights) -> list[list[float]]:
    """Of each stage and option, the least weighted sum of all that comes after it."""
    rows = [[_weigh(pair, weights) for pair in row] for row in turns]
    after = [[0.0] * len(turns)]
    for stage in reversed(stages[1:]):
        value = [_weigh(pair, weights) + rest for pair, rest in zip(stage, after[-1], strict=True)]
        after.append([min(map(add, row, value)) for row in rows])
    return after[::-1]


def _route(stages: Stages, turns: Stages, weights: Weights) -> tuple[int, ...]:
    """The route of the least weighted sum; it keeps its option where it may."""
    route: list[int] = []
    for stage, after in zip(stages, _to_go(stages, turns, weights), strict=True):

        def rank(option: int, stage: Sequence[Pair] = stage, after: list[float] = after) -> tuple[float, bool]:
            turn = _weigh(turns[route[-1]][option], weights) if route else 0.0
            return _weigh(stage[option], weights) + turn + after[option], bool(route) and option != route[-1]

        route.append(min(range(len(stage)), key=rank))
    return tuple(route)


def _multiplier(
    stages: Stages, turns: Stages, limit: float, over: tuple[int, ...], within: tuple[int, ...]
) -> tuple[float, tuple[int, ...]]:
    """The price of the limited sum at which routes on both sides of the limit are equally good, and the one within."""
    multiplier = 0.0
    for _ in range(_ROUNDS):
        (cheap, much), (dear, little) = total(stages, turns, over), total(stages, turns, within)
        multiplier = max(0.0, (dear - cheap) / (much - little))
        route = _route(stages, turns, (1.0, multiplier))
        value, limited = total(stages, turns, route)
        known = cheap + multiplier * much
        if value + multiplier * limited >= known - _SLACK * abs(known):
            break
        over, within = (over, route) if limited <= limit else (route, within)
    return multiplier, within


def _improved(
    stages: Stages, turns: Stages, limit: float, multiplier: float, known: tuple[int, ...]
) -> tuple[int, ...]:
    """The best route within the limit, which the bound of `multiplier` lets no worse one than `known` hide."""
    bound, least = _to_go(stages, turns, (1.0, multiplier)), _to_go(stages, turns, (0.0, 1.0))
    best = total(stages, turns, known)[0]
    options = range(len(turns))
    front: list[list[Label]] = [[(0.0, 0.0, None)]]
    for number, stage in enumerate(stages):
        grown: list[list[Label]] = []
        for option in options:
            labels: list[Label] = []
            for before, some in enumerate(front):
                turn = turns[before][option] if number else (0.0, 0.0)
                adds, use = stage[option][0] + turn[0], stage[option][1] + turn[1]
                room = limit - least[number][option] - use
                worth = best * (1 - _SLACK) + multiplier * limit - bound[number][option] - adds - multiplier * use
                labels += [
                    (limited + use, value + adds, (option, label))
                    for label in some
                    for limited, value in [label[:2]]
                    if limited <= room and value + multiplier * limited < worth
                ]
            grown.append(_undominated(labels))
        front = grown
    ends = [label for some in front for label in some if label[1] < best]
    return _options(min(ends, key=lambda label: label[1])) if ends else known


def _undominated(labels: list[Label]) -> list[Label]:
    kept: list[Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept


def _options(label: Label) -> tuple[int, ...]:
    options: list[int] = []
    while label[2] is not None:
        option, label = label[2]
        options.append(option)
    return tuple(reversed(options))


def _weigh(pair: Pair, weights: Weights) -> float:
    return pair[0] * weights[0] + pair[1] * weights[1]
