"""The power law of losses over budgets, and its interval."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from tokendrop.study.frontier import fit

COSTS = [1e12 * 2**doubling for doubling in range(6)]


@given(factor=st.floats(0.1, 100), exponent=st.floats(-0.9, 0.5))
def test_points_on_a_power_law_give_it_back(factor, exponent):
    law = fit(COSTS, [factor * cost**exponent for cost in COSTS])
    assert law.factor == pytest.approx(factor, rel=1e-6)
    assert law.exponent == pytest.approx(exponent, abs=1e-8)
    assert law.low <= law.exponent <= law.high
    assert law.high - law.low < 1e-6


def test_the_interval_holds_the_exponent_in_95_of_100_draws():
    chance, draws = default_rng(0), 6000
    held = 0
    for _ in range(draws):
        law = fit(COSTS, [5 * cost**-0.08 * exp(chance.normal(0, 0.01)) for cost in COSTS])
        held += law.low <= -0.08 <= law.high
    assert 0.944 < held / draws < 0.956


def test_no_law_by_two_points_or_of_what_is_not_above_0():
    assert fit(COSTS[:2], [2.0, 1.0]) is None
    assert fit(COSTS[:3], [2.0, 1.0, 0.0]) is None
