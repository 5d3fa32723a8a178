"""Sequences that layers run on, against a walk through the steps and against the paper's formula."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.schedule.layer_dropout import DroppedSequences

STEPS = range(300)
decays = st.builds(
    DroppedSequences,
    sequences=st.integers(1, 500),
    share=st.floats(0, 1),
    time_constant=st.none() | st.floats(0.1, 1000),
)


@given(decays)
def test_ever_fewer_sequences_stay_and_the_next_change_is_where_they_do(kept: DroppedSequences) -> None:
    seen = [kept.at(step) for step in STEPS]
    assert seen == sorted(seen, reverse=True)
    assert 1 <= seen[-1] <= seen[0] <= kept.sequences
    for step in STEPS:
        next_one = kept.next_change(step)
        found = next((later for later in STEPS[step:] if seen[later] != seen[step]), None)
        assert next_one == found or (found is None and next_one is not None and next_one not in STEPS)


@given(decays)
def test_in_the_end_just_its_share_of_the_sequences_is_dropped(kept: DroppedSequences) -> None:
    assert kept.next_change(10**9) is None
    assert abs(kept.at(10**9) - max(1, kept.sequences * (1 - kept.share))) <= 0.5 + 1e-9
    if kept.time_constant is not None:
        assert kept.at(0) == kept.sequences


@given(
    theta=st.floats(0.01, 1),
    gamma=st.floats(1e-4, 1),
    layers=st.integers(1, 48),
    data=st.data(),
    step=st.integers(0, 9999),
)
def test_the_share_is_that_of_the_paper(
    theta: float, gamma: float, layers: int, data: st.DataObject, step: int
) -> None:
    """Zhang & He 2020: theta(t) = (1 - theta) exp(-gamma t) + theta; layer l runs with 1 - l / L (1 - theta(t))."""
    layer = data.draw(st.integers(0, layers - 1))
    now = (1 - theta) * exp(-gamma * step) + theta
    runs = 1 - layer / layers * (1 - now)
    ours = DroppedSequences(sequences=10**6, share=layer / layers * (1 - theta), time_constant=1 / gamma)
    assert ours.at(step) == pytest.approx(10**6 * runs, abs=0.51)
