"""How well the trials of a sweep followed each other."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.study.usage import usage_of

times = st.integers(1, 1000)


@given(places=st.integers(1, 4), rounds=st.integers(1, 6), seconds=times, gaps=st.lists(times, min_size=5, max_size=5))
def test_trials_of_one_length_follow_each_other_after_known_gaps(places, rounds, seconds, gaps):
    begins = [sum(gaps[:number]) + number * seconds for number in range(rounds)]
    spans = [(begin, begin + seconds) for begin in begins for _ in range(places)]
    usage = usage_of(spans)
    if places * rounds < 2:
        assert usage is None
        return
    assert usage is not None
    assert usage.places == places
    assert usage.busy_share == pytest.approx(rounds * seconds / (begins[-1] + seconds))
    assert usage.startup_s == (median(gaps[: rounds - 1]) if rounds > 1 else None)


@given(spans=st.lists(st.tuples(times, times).map(lambda pair: (pair[0], pair[0] + pair[1])), min_size=2, max_size=12))
def test_no_place_is_busy_for_longer_than_there_is_time(spans):
    usage = usage_of(spans)
    assert usage is not None
    assert 0 < usage.busy_share <= 1
    assert 1 <= usage.places <= len(spans)
