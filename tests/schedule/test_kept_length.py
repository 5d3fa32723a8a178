"""Kept-length schedules, against a walk through the steps."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import LONGEST_GROWTH, mslg, schedules
from tokendrop.schedule.kept_length import Constant, KeptLengthSchedule, Mslg, Piecewise

FULL = 64
STEPS = range(LONGEST_GROWTH + 1)


@given(schedules(FULL))
def test_the_kept_length_never_shrinks_and_stays_in_range(schedule: KeptLengthSchedule) -> None:
    lengths = [schedule.kept_length(step) for step in STEPS]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] <= FULL


@given(schedules(FULL))
def test_next_change_is_the_first_step_whose_kept_length_differs(schedule: KeptLengthSchedule) -> None:
    lengths = [schedule.kept_length(step) for step in STEPS]
    for step in STEPS:
        changes = (later for later in STEPS[step:] if lengths[later] != lengths[step])
        assert schedule.next_change(step) == next(changes, None)


@given(mslg(FULL))
def test_mslg_adds_an_increment_each_time_an_interval_has_passed(schedule: Mslg) -> None:
    kept, next_jump = schedule.start, schedule.interval
    for step in STEPS:
        while next_jump <= step:
            kept, next_jump = kept + schedule.increment, next_jump + schedule.interval
        assert schedule.kept_length(step) == min(kept, schedule.full)


@given(
    st.integers(1, FULL - 1),
    st.integers(1, FULL),
    st.fractions(Fraction(1, 3), LONGEST_GROWTH, max_denominator=9),
)
def test_linear_growth_arrives_at_full_at_its_end_and_not_before(start: int, increment: int, until: Fraction) -> None:
    schedule = Mslg.until(start=start, full=FULL, increment=increment, steps=until)
    arrival = ceil(until)
    assert schedule.kept_length(arrival) == FULL
    assert schedule.kept_length(arrival - 1) < FULL
    assert schedule.kept_length(0) == start


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Constant(kept=0),
        lambda: Mslg(start=0, full=8, increment=1, interval=Fraction(1)),
        lambda: Mslg(start=9, full=8, increment=1, interval=Fraction(1)),
        lambda: Mslg(start=1, full=8, increment=0, interval=Fraction(1)),
        lambda: Mslg(start=1, full=8, increment=1, interval=Fraction(0)),
        lambda: Mslg.until(start=1, full=8, increment=0, steps=Fraction(5)),
        lambda: Mslg.until(start=9, full=8, increment=1, steps=Fraction(5)),
        lambda: Mslg.until(start=1, full=8, increment=1, steps=Fraction(0)),
        lambda: Piecewise(stages=()),
        lambda: Piecewise(stages=((1, 4),)),
        lambda: Piecewise(stages=((0, 4), (0, 5))),
        lambda: Piecewise(stages=((0, 4), (3, 2))),
        lambda: Piecewise(stages=((0, 0),)),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="want"):
        wrong()
