"""A kept length that is decided as the run goes: whatever is decided, the budget is spent, and what is past stays."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, nan

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tiny import experiment
from tokendrop.schedule.adaptive import Adaptive
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import KeptByStep

FULL = 64


@st.composite
def cases(draw: st.DrawFn) -> tuple[Adaptive, Clock]:
    """A schedule in a run that can spend its budget."""
    clock = Clock(global_batch=2, sequence_length=FULL, total_steps=draw(st.integers(4, 200)))
    start, increment = draw(st.integers(1, FULL)), draw(st.integers(1, 24))
    every = Duration(draw(st.fractions(1, 20, max_denominator=4)), "steps")
    return adaptive(clock, draw(st.floats(0, 1)), start=start, increment=increment, every=every), clock


def adaptive(clock: Clock, share: float, **given: object) -> Adaptive:
    """With a budget that lies so far between the least and the most that can be spent."""
    full = clock.total_steps * FULL
    free = Adaptive(budget=1, **given)  # pyright: ignore[reportArgumentType]
    found = re.search(r"want ([0-9.]+) to ([0-9.]+)", str(refusal(free, clock))) if refusal(free, clock) else None
    least, most = (float(found[1]), float(found[2])) if found else (free.start / FULL, 1.0)
    assume(least <= most and least * full >= 1)
    return replace(free, budget=least + share * (most - least))


def refusal(schedule: Adaptive, clock: Clock) -> ValueError | None:
    try:
        schedule.resolve(clock)
    except ValueError as error:
        return error
    return None


def lengths(kept: KeptByStep, clock: Clock) -> list[int]:
    return [kept.at(step) for step in range(clock.total_steps)]


def decided(schedule: Adaptive, clock: Clock, wants: st.DataObject) -> Adaptive:
    """With all of it decided, by choices that are drawn."""
    while schedule.next_decision(clock) is not None:
        kept = schedule.choices(clock)[wants.draw(st.booleans())]
        schedule = replace(schedule, decided=(*schedule.decided, kept))
    return schedule


@given(cases(), st.data())
def test_whatever_is_decided_the_budget_is_spent_to_within_a_jump(case: tuple[Adaptive, Clock], data) -> None:
    schedule, clock = case
    longest = int(schedule.every.amount) + 1
    budget = int(schedule.budget * FULL * clock.total_steps)
    for one in (decided(schedule, clock, data).resolve(clock), schedule.resolve(clock), *schedule.bounds(clock)):
        kept = lengths(one, clock)
        assert kept[0] == schedule.start
        assert all(after - before in (0, min(schedule.increment, FULL - before)) for before, after in pairwise(kept))
        assert 0 <= budget - sum(kept) < schedule.increment * longest


@given(cases(), st.data())
def test_what_is_decided_stays_whatever_comes_after_it(case: tuple[Adaptive, Clock], data) -> None:
    schedule, clock = case
    whole = decided(schedule, clock, data)
    expected = lengths(whole.resolve(clock), clock)
    for count in range(len(whole.decided) + 1):
        part = replace(schedule, decided=whole.decided[:count])
        known = part.next_decision(clock) or clock.total_steps
        assert lengths(part.resolve(clock), clock)[:known] == expected[:known]
        if known < clock.total_steps:
            assert part.number_of(clock, known) == count


@given(cases(), st.data())
def test_by_any_step_no_decisions_spend_a_jump_more_or_less_than_the_bounds(case: tuple[Adaptive, Clock], data) -> None:
    schedule, clock = case
    jump = schedule.increment * (int(schedule.every.amount) + 1)
    latest, earliest = ([*accumulate(lengths(one, clock))] for one in schedule.bounds(clock))
    spent = [*accumulate(lengths(decided(schedule, clock, data).resolve(clock), clock))]
    assert all(least - jump < now < most + jump for least, now, most in zip(latest, spent, earliest, strict=True))


CLOCK = Clock(global_batch=2, sequence_length=FULL, total_steps=100)
SCHEDULE = Adaptive(start=16, increment=8, every=Duration(Fraction(10), "steps"), budget=0.5)


@pytest.mark.parametrize(
    ("so_far", "gap", "wants"),
    [
        ((16,), 0.06, True),
        ((16,), 0.01, False),
        ((16,), 0.03, False),  # between the two it does what it did last
        ((16, 24), 0.03, True),
        ((16, 24), 0.01, False),
        ((16,), nan, True),
        ((16,), inf, True),
        ((16,), -0.06, True),
        ((16,), -0.01, False),
        ((16, 24), -0.03, True),
    ],
)
def test_it_grows_over_one_gap_and_stays_below_another(so_far: tuple[int, ...], gap: float, wants: bool) -> None:
    assert replace(SCHEDULE, decided=so_far).wants(gap) is wants


def test_without_a_decision_growth_is_even() -> None:
    kept = lengths(SCHEDULE.resolve(CLOCK), CLOCK)
    jumps = [step for step in range(1, 100) if kept[step] != kept[step - 1]]
    assert sum(kept) == 3200
    assert {b - a for a, b in pairwise(jumps)} <= {10, 20}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"budget": 0.2},
            r"^budget: want 0\.25 to 0\.737, which growth from 16 by 8 every 10 steps can spend, got 0\.2$",
        ),
        ({"budget": 0.9}, r"^budget: want 0\.25 to 0\.737, "),
        ({"every": Duration.parse("0.5 steps")}, r"^every: want at least 1 step between decisions, got 0\.5 steps$"),
        ({"start": 65, "budget": 1}, r"^want a start of at most the full length of 64, got 65$"),
        ({"decided": (24, 40)}, r"^decided: want 24 or 32 at decision 2, got 40$"),
        ({"decided": (16,) * 10}, r"^decided: want at most 9 kept lengths, got 10$"),
    ],
)
def test_what_can_not_be_is_refused_in_one_sentence(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SCHEDULE, **wrong).resolve(CLOCK)  # pyright: ignore[reportArgumentType]


def test_a_decision_changes_nothing_of_what_is_done_by_then_nor_its_learning_rate() -> None:
    schedule = {"kind": "adaptive", "start": 4, "increment": 2, "every": "4 steps", "budget": 0.6}
    job = experiment(train__length="40 steps", drop__schedule=schedule)
    plans = [job.with_decided({"schedule": kept}).plan for kept in [(), (4, 4, 6), (4, 4, 6, 8, 8), (4, 4, 4, 4, 4)]]
    for step in range(16):
        assert plans[1].lr(step) == plans[2].lr(step)
        assert plans[1].layer_tokens(step + 1) == plans[2].layer_tokens(step + 1)
    assert plans[3].at(22).kept_length == 4
    assert plans[2].at(22).kept_length == 8
    assert len({plan.learning_rate for plan in plans}) == 1


@pytest.mark.parametrize("method", [{"method": "sequence_warmup"}, {"method": "mixture_of_depths"}])
def test_methods_that_do_not_evaluate_whole_have_none(method: dict[str, str]) -> None:
    schedule = {"kind": "adaptive", "start": 4, "every": "1 steps", "budget": 0.6}
    with pytest.raises(Exception, match=r"drop\.schedule: kind 'adaptive' probes by evaluation with and without"):
        experiment(drop={**method, "schedule": schedule})
