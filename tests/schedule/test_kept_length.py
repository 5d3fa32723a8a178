"""Kept-length schedules, against a walk through the steps."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import LONGEST_GROWTH, jumps, schedules
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import Jumps, KeptByStep, Stages
from tokendrop.schedule.kept_length import Constant, Full, Linear, Mslg, Piecewise, Root, Stage

FULL = 64
STEPS = range(LONGEST_GROWTH + 1)
CLOCK = Clock(global_batch=2, sequence_length=FULL, total_steps=100)


def linear(*, start: int, until: Fraction, increment: int) -> KeptByStep:
    return Linear(start=start, until=Duration(until, "steps"), increment=increment).resolve(CLOCK)


def test_a_schedule_says_the_same_in_steps_in_tokens_and_as_a_share_of_the_run() -> None:
    for written in ("25 steps", "3200 tokens", "25%"):
        length = Duration.parse(written)
        grown = Mslg(start=8, increment=4, every=length).resolve(CLOCK)
        assert grown == Jumps(start=8, full=FULL, increment=4, interval=Fraction(25))
        stages = (Stage(at=Duration.parse(0), kept=3), Stage(at=length, kept=5))
        assert Piecewise(stages=stages).resolve(CLOCK) == Stages(stages=((0, 3), (25, 5)))
        assert Linear(start=FULL - 2, until=length, increment=1).resolve(CLOCK) == Jumps(
            start=FULL - 2, full=FULL, increment=1, interval=Fraction(25, 2)
        )
    assert Mslg(start=8, increment=4, every=length, full=16).resolve(CLOCK).at(10**6) == 16
    assert Full().resolve(CLOCK).at(0) == FULL


@given(schedules(FULL))
def test_the_kept_length_never_shrinks_and_stays_in_range(schedule: KeptByStep) -> None:
    lengths = [schedule.at(step) for step in STEPS]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] <= FULL


@given(schedules(FULL))
def test_next_change_is_the_first_step_whose_kept_length_differs(schedule: KeptByStep) -> None:
    lengths = [schedule.at(step) for step in STEPS]
    for step in STEPS:
        changes = (later for later in STEPS[step:] if lengths[later] != lengths[step])
        assert schedule.next_change(step) == next(changes, None)


@given(jumps(FULL))
def test_jumps_add_an_increment_each_time_an_interval_has_passed(schedule: Jumps) -> None:
    kept, next_jump = schedule.start, schedule.interval
    for step in STEPS:
        while next_jump <= step:
            kept, next_jump = kept + schedule.increment, next_jump + schedule.interval
        assert schedule.at(step) == min(kept, schedule.full)


@given(
    st.integers(1, FULL - 1),
    st.integers(1, FULL),
    st.fractions(Fraction(1, 3), LONGEST_GROWTH, max_denominator=9),
)
def test_linear_growth_arrives_at_full_at_its_end_and_not_before(start: int, increment: int, until: Fraction) -> None:
    schedule = linear(start=start, until=until, increment=increment)
    arrival = ceil(until)
    assert schedule.at(arrival) == FULL
    assert schedule.at(arrival - 1) < FULL
    assert schedule.at(0) == start


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Constant(kept=0),
        lambda: Jumps(start=0, full=8, increment=1, interval=Fraction(1)),
        lambda: Jumps(start=9, full=8, increment=1, interval=Fraction(1)),
        lambda: Jumps(start=1, full=8, increment=0, interval=Fraction(1)),
        lambda: Jumps(start=1, full=8, increment=1, interval=Fraction(0)),
        lambda: linear(start=1, increment=0, until=Fraction(5)),
        lambda: linear(start=FULL + 1, increment=1, until=Fraction(5)),
        lambda: linear(start=1, increment=1, until=Fraction(0)),
        lambda: Stages(stages=()),
        lambda: Stages(stages=((1, 4),)),
        lambda: Stages(stages=((0, 4), (0, 5))),
        lambda: Stages(stages=((0, 4), (3, 2))),
        lambda: Stages(stages=((0, 0),)),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="want"):
        wrong()


@given(
    st.integers(1, FULL - 1),
    st.integers(1, FULL),
    st.fractions(Fraction(1, 3), LONGEST_GROWTH, max_denominator=9),
    st.integers(1, 4),
)
def test_root_growth_is_at_each_step_as_far_as_the_root_says(
    start: int, increment: int, until: Fraction, degree: int
) -> None:
    schedule = Root(start=start, until=Duration(until, "steps"), increment=increment, degree=degree).resolve(CLOCK)
    for step in STEPS[1:]:
        far = sum(
            until * Fraction(kept - start, FULL - start) ** degree <= step
            for kept in [*range(start + increment, FULL, increment), FULL]
            if kept > start
        )
        assert schedule.at(step) == min(FULL, start + far * increment)
    assert schedule.at(0) == start


def test_root_growth_of_the_first_degree_is_even() -> None:
    until = Duration.parse("50%")
    even = Linear(start=8, until=until, increment=8).resolve(CLOCK)
    root = Root(start=8, until=until, increment=8, degree=1).resolve(CLOCK)
    assert [root.at(step) for step in range(100)] == [even.at(step) for step in range(100)]
    faster = Root(start=8, until=until, increment=8).resolve(CLOCK)
    assert all(faster.at(step) >= even.at(step) for step in range(100))
    for wrong in ({"degree": 0}, {"start": 0}, {"increment": 0}):
        with pytest.raises(ValueError, match="want"):
            Root(**{"start": 8, "until": until, **wrong})
    for wrong in ({"start": FULL}, {"until": Duration.parse(0)}):
        with pytest.raises(ValueError, match="want"):
            Root(**{"start": 8, "until": until, **wrong}).resolve(CLOCK)
