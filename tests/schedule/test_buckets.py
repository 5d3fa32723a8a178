"""Kept lengths that are rounded to a few: how many, how far from the schedule's, and that the plan counts by them."""

from fractions import Fraction
from itertools import groupby
from math import ceil, floor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strategies import LONGEST_GROWTH, exact_schedules
from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.launch.resume import settings
from tokendrop.schedule.kept_by_step import KeptByStep, Stages, in_buckets

FULL = 64
STEPS = range(LONGEST_GROWTH + 1)
BUCKETS = st.integers(2, 12)
ADAPTIVE = {"kind": "adaptive", "start": 4, "increment": 4, "every": "1 steps", "budget": 0.6}


@given(exact_schedules(FULL), BUCKETS)
def test_lengths_are_few_near_the_schedules_and_the_same_at_first_and_in_the_end(
    schedule: KeptByStep, buckets: int
) -> None:
    exact = [schedule.at(step) for step in STEPS]
    rounded = [in_buckets(schedule, buckets).at(step) for step in STEPS]
    assert len({*rounded}) <= buckets
    assert (rounded[0], rounded[-1]) == (exact[0], exact[-1])
    assert rounded == sorted(rounded)
    spacing = ceil(Fraction(exact[-1] - exact[0], buckets - 1))
    assert all(abs(one - other) <= spacing / 2 for one, other in zip(rounded, exact, strict=True))


@given(exact_schedules(FULL), BUCKETS)
@example(Stages(stages=((0, 4), (1, 6), (2, 7), (3, 8))), 2)  # 6 is as near to 4 as to 8
@example(Stages(stages=((0, 4), (1, 5), (2, 6), (3, 7))), 3)  # between 4 and 7 there is no whole number
def test_each_is_the_nearest_of_evenly_spaced_ones_unless_there_are_few_anyway(
    schedule: KeptByStep, buckets: int
) -> None:
    exact, bucketed = [schedule.at(step) for step in STEPS], in_buckets(schedule, buckets)
    if len({*exact}) <= buckets:
        assert bucketed == schedule
        return
    low, high = exact[0], exact[-1]
    even = [floor(low + Fraction(n * (high - low), buckets - 1) + Fraction(1, 2)) for n in range(buckets)]
    nearest = [max(length for length in even if abs(length - k) == min(abs(e - k) for e in even)) for k in exact]
    assert [bucketed.at(step) for step in STEPS] == nearest


@given(exact_schedules(FULL), BUCKETS)
def test_what_is_rounded_already_stays(schedule: KeptByStep, buckets: int) -> None:
    once = in_buckets(schedule, buckets)
    assert in_buckets(once, buckets) == once


@pytest.mark.parametrize("method", ["random_ltd", "tread", "sequence_warmup", "mixture_of_depths"])
def test_a_plan_counts_by_the_rounded_lengths(method: str) -> None:
    drop = {"method": method, "schedule": {"kind": "linear", "start": 3, "until": "80%", "increment": 2}}
    how = {"train__length": "40 steps", "train__tokens_per_micro_batch": "auto"}
    exact, rounded = (experiment(drop=drop | more, **how).plan for more in ({}, {"buckets": 4}))
    lengths = [rounded.at(step).kept[0] for step in range(40)]
    assert {*lengths} == {3, 7, 12, 16}
    assert {exact.at(step).kept[0] for step in range(40)} == {*range(3, 17, 2), 16}
    runs = [[step for step, _ in run] for _, run in groupby(enumerate(lengths), key=lambda one: one[1])]
    stages = [{"at": f"{run[0]} steps", "kept": lengths[run[0]]} for run in runs]
    given_outright = {"method": method, "schedule": {"kind": "piecewise", "stages": stages}}
    assert rounded == experiment(drop=given_outright, **how).plan


def test_layers_with_schedules_of_their_own_have_as_many_lengths_each() -> None:
    other = {"kind": "linear", "start": 6, "until": "100%", "increment": 1}
    job = experiment(train__length="40 steps", drop__buckets=2, drop__by_layer={"2": other})
    assert [{segment.kept[layer] for segment in job.plan.segments} for layer in (0, 1)] == [{4, 16}, {6, 16}]


def test_they_are_what_is_trained_so_a_run_keeps_them() -> None:
    assert settings(experiment(drop__buckets=3)) != settings(experiment(drop__buckets=4)) != settings(experiment())


@pytest.mark.parametrize(
    ("drop", "sentence"),
    [
        ({"method": "random_ltd", "buckets": 1}, "drop.buckets: want at least 2 kept lengths, got 1"),
        ({"method": "random_ltd", "buckets": 2.5}, "drop.buckets: want a whole number, got 2.5"),
        ({"method": "none", "buckets": 4}, "drop.buckets: method 'none' has no kept length by step"),
        ({"method": "layer_dropout", "keep": 0.5, "buckets": 4}, "drop.buckets: method 'layer_dropout' has no kept"),
        ({"method": "random_ltd", "buckets": 4, "schedule": ADAPTIVE}, "drop.buckets: kept lengths of kind 'adaptive'"),
    ],
)
def test_what_can_not_be_is_one_sentence(drop: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        experiment(drop=drop)
    assert str(error.value).startswith(sentence)
