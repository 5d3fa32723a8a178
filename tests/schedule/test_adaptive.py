"""A kept length that is decided as the run goes: whatever is decided, the budget is spent, and what is past stays."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies import MEASURED
from tiny import experiment
from tokendrop.config.load import dump
from tokendrop.schedule.adaptive import Adaptive
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import KeptByStep
from tokendrop.schedule.scaling import estimate

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


def bounds(schedule: Adaptive, clock: Clock) -> tuple[Adaptive, Adaptive]:
    """With the latest and with the earliest growth."""
    return schedule.always(clock, wants=False), schedule.always(clock, wants=True)


@given(cases(), st.data())
def test_whatever_is_decided_the_budget_is_spent_to_within_a_jump(case: tuple[Adaptive, Clock], data) -> None:
    schedule, clock = case
    longest = int(schedule.every.amount) + 1
    budget = int(schedule.budget * FULL * clock.total_steps)
    for one in (decided(schedule, clock, data), schedule, *bounds(schedule, clock)):
        kept = lengths(one.resolve(clock), clock)
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
            assert part.decisions(clock).index(known) == count


@given(cases(), st.data())
def test_by_any_step_no_decisions_spend_a_jump_more_or_less_than_the_bounds(case: tuple[Adaptive, Clock], data) -> None:
    schedule, clock = case
    jump = schedule.increment * (int(schedule.every.amount) + 1)
    latest, earliest = ([*accumulate(lengths(one.resolve(clock), clock))] for one in bounds(schedule, clock))
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
        ({"decided": (24, 32, 40, 48, 56)}, r"^decided: want 32 at decision 3, got 40$"),
        ({"probe_batches": 0}, r"^probe_batches: want at least 1, got 0$"),
    ],
)
def test_what_can_not_be_is_refused_in_one_sentence(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SCHEDULE, **wrong).resolve(CLOCK)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("budget", [0.6, 0.63])
def test_a_decision_changes_nothing_of_what_is_done_by_then_nor_its_learning_rate(budget: float) -> None:
    schedule = {"kind": "adaptive", "start": 4, "increment": 5, "every": "4 steps", "budget": budget}
    job = experiment(train__length="40 steps", drop__schedule=schedule)
    latest, earliest = (job.drop.adaptive["schedule"].always(job.clock, wants=wants).decided for wants in (False, True))
    assert latest[:3] != earliest[:3]
    for whole in (latest, earliest):
        plans = [job.with_decided({"schedule": whole[:count]}).plan for count in range(1, 10)]
        for count, plan in enumerate(plans, start=1):
            for step in range(4 * (count + 1)):  # known by then
                assert plan.lr(step) == plans[-1].lr(step)
                assert plan.layer_tokens(step + 1) == plans[-1].layer_tokens(step + 1)
                assert plan.at(step).kept == plans[-1].at(step).kept
        assert {plan.learning_rate for plan in plans} == {job.plan.learning_rate}


@pytest.mark.parametrize("method", [{"method": "sequence_warmup"}, {"method": "mixture_of_depths"}])
def test_methods_that_do_not_evaluate_whole_have_none(method: dict[str, str]) -> None:
    schedule = {"kind": "adaptive", "start": 4, "every": "1 steps", "budget": 0.6}
    with pytest.raises(
        Exception, match=r"drop\.schedule: kind 'adaptive' evaluates with dropping and without, which method"
    ):
        experiment(drop={**method, "schedule": schedule})


def test_any_number_of_workers_may_come_of_decisions(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(dump(MEASURED))
    schedule = {"kind": "adaptive", "start": 4, "increment": 2, "every": "4 steps", "budget": 0.6}
    scaling = {"mode": "schedule", "profile": str(tmp_path / "profile.yaml"), "max_workers": 2}
    given = {"train__length": "40 steps", "scaling": scaling}
    assert max(segment.workers for segment in experiment(**given, drop__schedule=schedule).plan.segments) == 1
    assert experiment(**given, drop__schedule=schedule).most_workers == 2
    assert experiment(**given).most_workers == 1


def test_a_schedule_that_no_layer_goes_by_is_refused() -> None:
    schedule = {"kind": "adaptive", "start": 4, "every": "1 steps", "budget": 0.6}
    with pytest.raises(Exception, match=r"drop\.schedule: no layer goes by this schedule"):
        experiment(drop={"method": "random_ltd", "schedule": schedule, "by_layer": {"1-2": {"kind": "full"}}})


def test_a_deadline_that_a_decision_breaks_is_missed_by_as_little_as_can_be(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(dump(MEASURED))
    schedule = {"kind": "adaptive", "start": 4, "increment": 2, "every": "4 steps", "budget": 0.6}
    scaling = {"mode": "schedule", "profile": str(tmp_path / "profile.yaml"), "max_workers": 2}
    given = {"train__length": "40 steps", "drop__schedule": schedule, "scaling": scaling}
    free = experiment(**given)
    fast = replace(free, scaling=replace(free.scaling, minimise="time")).plan
    least = estimate(fast, MEASURED).wall_clock_s / 3600
    job = replace(free, scaling=replace(free.scaling, deadline_hours=least * (1 + 1e-9)))
    latest = {"schedule": job.drop.adaptive["schedule"].always(job.clock, wants=False).decided}
    earliest = {"schedule": job.drop.adaptive["schedule"].always(job.clock, wants=True).decided}
    took = [estimate(job.with_decided(one).plan, MEASURED).wall_clock_s / 3600 for one in (latest, earliest)]
    assert max(took) > least * (1 + 1e-9)
    with pytest.raises(ValueError, match="deadline_hours"):
        replace(job, scaling=replace(job.scaling, deadline_hours=least * 0.9))
