"""The search for a route, against all routes."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.schedule.search import Pair, best_route, total

amounts = st.integers(0, 50).map(float)
pairs = st.tuples(amounts, amounts)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Stages of some options each, and what it adds to go from one option to another; up to 243 routes."""
    options, stages = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    row = st.lists(pairs, min_size=options, max_size=options)
    turns = [[(0.0, 0.0) if i == j else draw(pairs) for j in range(options)] for i in range(options)]
    return draw(st.lists(row, min_size=stages, max_size=stages)), turns


def all_totals(stages: list[list[Pair]], turns: list[list[Pair]]) -> list[Pair]:
    return [total(stages, turns, route) for route in product(range(len(turns)), repeat=len(stages))]


@given(cases(), st.data())
def test_no_route_within_the_limit_is_better(
    case: tuple[list[list[Pair]], list[list[Pair]]], data: st.DataObject
) -> None:
    """The limit is what some route takes, so that there is often a better one which just fails it."""
    every = all_totals(*case)
    limit = data.draw(st.sampled_from(sorted({limited for _, limited in every})))

    route = best_route(*case, limit)

    assert route is not None
    value, limited = total(*case, route)
    assert limited <= limit * (1 + 1e-8)
    assert value <= min(value for value, limited in every if limited <= limit) * (1 + 1e-8)


@given(cases())
def test_a_limit_below_all_routes_is_kept_by_none(case: tuple[list[list[Pair]], list[list[Pair]]]) -> None:
    least = min(limited for _, limited in all_totals(*case))
    assert least == 0 or best_route(*case, least * 0.99) is None


@given(cases())
def test_without_a_limit_the_least_of_all_is_found(case: tuple[list[list[Pair]], list[list[Pair]]]) -> None:
    route = best_route(*case)
    assert route is not None
    assert total(*case, route)[0] == pytest.approx(min(value for value, _ in all_totals(*case)))
