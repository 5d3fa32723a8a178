"""The search for a route, against all routes and the bound of the Lagrange multiplier."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendrop.schedule.search import Pair, best_route, total

# Mostly what is cheap in one sum is dear in the other.
pairs = st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda pair: (float(pair[0]), 50.0 - pair[0] + pair[1]))
few = st.integers(0, 5).map(float)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Stages of some options each, and what it adds to go from one option to another; up to 81 routes."""
    options, stages = draw(st.integers(2, 3)), draw(st.integers(1, 4))
    row = st.lists(pairs, min_size=options, max_size=options)
    turns = [[(0.0, 0.0) if i == j else draw(st.tuples(few, few)) for j in range(options)] for i in range(options)]
    return draw(st.lists(row, min_size=stages, max_size=stages)), turns


def all_totals(stages: list[list[Pair]], turns: list[list[Pair]]) -> list[Pair]:
    return [total(stages, turns, route) for route in product(range(len(turns)), repeat=len(stages))]


def best_at_the_price(every: list[Pair], limit: float) -> list[Pair]:
    """Of the routes that keep the limit, those that no price of the limited sum tells from the best one.

    The price is the one that gives the highest lower bound on all routes within the limit.
    """
    best = {
        one for one in every if not any(other[0] <= one[0] and other[1] <= one[1] and other != one for other in every)
    }
    prices = {0.0} | {(b[0] - a[0]) / (a[1] - b[1]) for a in best for b in best if a[1] > b[1]}
    bounds = {price: min(value + price * (limited - limit) for value, limited in best) for price in prices}
    highest = max(bounds.values())
    assert highest <= min(value for value, limited in best if limited <= limit) + 1e-6
    highest_at = [price for price, bound in bounds.items() if bound > highest - 1e-6]
    return [
        (value, limited)
        for value, limited in best
        if limited <= limit and any(value + price * (limited - limit) < highest + 1e-6 for price in highest_at)
    ]


@settings(max_examples=200)
@given(cases(), st.data())
def test_a_route_keeps_the_limit_and_no_price_shows_a_better_one_nor_does_one_change(
    case: tuple[list[list[Pair]], list[list[Pair]]], data: st.DataObject
) -> None:
    """The limit is what some route takes, so that there is often a better one which just fails it."""
    every = all_totals(*case)
    limit = data.draw(st.sampled_from(sorted({limited for _, limited in every})))

    route = best_route(*case, limit)

    assert route is not None
    value, limited = total(*case, route)
    assert limited <= limit * (1 + 1e-8)
    assert value <= max(value for value, _ in best_at_the_price(every, limit)) + 1e-6
    for one, two in product(range(len(case[1])), repeat=2):
        for change in range(len(case[0])):
            once = total(*case, [one] * change + [two] * (len(case[0]) - change))
            assert once[1] > limit or value <= once[0] + 1e-6


@given(cases())
def test_a_limit_below_all_routes_is_kept_by_none(case: tuple[list[list[Pair]], list[list[Pair]]]) -> None:
    least = min(limited for _, limited in all_totals(*case))
    assert least == 0 or best_route(*case, least * 0.99) is None


@given(cases())
def test_without_a_limit_the_least_of_all_is_found(case: tuple[list[list[Pair]], list[list[Pair]]]) -> None:
    route = best_route(*case)
    assert route is not None
    assert total(*case, route)[0] == pytest.approx(min(value for value, _ in all_totals(*case)))
