"""From where on trials are compared, and which sweeps leave no room for that."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ray.tune.schedulers import TrialScheduler

from tiny import TOKENS, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.study.early_stopping import Asha, Median, scheduler_for
from tokendrop.study.reports import RUN
from tokendrop.study.schedulers import EndedTrial


def job(until: int, every: int = 10) -> ExperimentConfig:
    """100 steps, of which the kept length grows over so many."""
    schedule = {"kind": "linear", "start": 4, "until": f"{until} steps", "increment": 1}
    drop = {"method": "random_ltd", "schedule": schedule}
    return experiment(train__length="100 steps", evaluate__every=f"{every} steps", drop=drop)


def grace_of(jobs: list[ExperimentConfig]) -> int:
    """Layer tokens of the grace, as the refusal of jobs without a validation after it tells."""
    with pytest.raises(UserError, match="no trial is validated after a grace of") as refused:
        scheduler_for(Asha(), jobs, metric="val_loss", mode="min")
    return int(re.search(r"grace of ([\d,]+) layer", str(refused.value))[1].replace(",", ""))


def grown_at(config: ExperimentConfig) -> int:
    """Layer tokens consumed when every token is first seen by every layer."""
    plan = config.plan
    return plan.layer_tokens(next(one.start for one in plan.segments if set(one.kept) == {TOKENS}))


@given(until=st.integers(20, 99))
def test_the_grace_lasts_until_all_trials_see_every_token(until: int) -> None:
    jobs = [job(20, every=100), job(until, every=100)]
    assert grace_of(jobs) == max(map(grown_at, jobs))


@pytest.mark.parametrize("stopping", [Asha(), Median()], ids=["asha", "median"])
def test_a_validation_between_the_grace_and_the_end_is_wanted(stopping: Asha | Median) -> None:
    assert scheduler_for(stopping, [job(85)], metric="val_loss", mode="min")  # at step 90
    for refused in (job(95), job(85, every=50), job(85, every=100)):
        with pytest.raises(UserError, match=r"want one by scheduler\.grace"):
            scheduler_for(stopping, [refused], metric="val_loss", mode="min")
    assert scheduler_for(replace(stopping, grace=1), [job(95)], metric="val_loss", mode="min")


class Told(Median):
    """Gives back what a scheduler is made with."""

    def made(self, metric: str, mode: str, *, grace: int, end: int, earlier: Any) -> tuple[int, int]:
        return grace, end


@pytest.mark.parametrize("budget", [0.6, 0.63, 0.7])
def test_whatever_a_trial_decides_it_is_compared_after_its_growth_and_not_beyond_its_end(budget: float) -> None:
    schedule = {"kind": "adaptive", "start": 4, "increment": 2, "every": "5 steps", "budget": budget}
    drop = {"method": "random_ltd", "schedule": schedule}
    config = experiment(train__length="100 steps", evaluate__every="2 steps", drop=drop)
    grace, end = scheduler_for(Told(), [config], metric="val_loss", mode="min")
    for wants in (False, True):
        decided = config.drop.adaptive["schedule"].always(config.clock, wants=wants).decided
        plan = config.with_decided({"schedule": decided}).plan
        assert plan.layer_tokens(95) <= grace  # where it is decided last
        assert plan.layer_tokens(plan.steps) < end


Report = dict[str, float]

LOSSES = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), min_size=8, max_size=8)


@dataclass(frozen=True)
class LiveTrial:
    """What schedulers use of a trial of Ray Tune."""

    trial_id: str
    status: str = "PENDING"

    @property
    def config(self) -> dict[str, str]:
        return {RUN: self.trial_id}


class OneWaits:
    """What schedulers use of Ray Tune's controller."""

    def get_live_trials(self) -> list[LiveTrial]:
        return [LiveTrial("waits")]


def curve_of(losses: list[float]) -> list[Report]:
    return [{"layer_tokens": 100 * place, "val_loss": loss} for place, loss in enumerate(losses, 1)]


def begun(scheduler: Any, run: str) -> LiveTrial:
    scheduler.on_trial_add(OneWaits(), LiveTrial(run))
    return LiveTrial(run)


def reported(scheduler: Any, trial: LiveTrial, curve: list[Report]) -> list[Report]:
    """As much of a curve as a trial reports until it is ended. Some come twice, as after a lost process."""
    for place, report in enumerate(curve, 1):
        decision = scheduler.on_trial_result(OneWaits(), trial, report)
        assert decision in (TrialScheduler.CONTINUE, TrialScheduler.STOP)  # trials can't be paused
        if decision == TrialScheduler.STOP:
            return curve[:place]
        if place % 2 == 0:
            assert scheduler.on_trial_result(OneWaits(), trial, report) == TrialScheduler.CONTINUE
    return curve


def trained(scheduler: Any, run: str, curve: list[Report]) -> list[Report]:
    trial = begun(scheduler, run)
    found = reported(scheduler, trial, curve)
    scheduler.on_trial_complete(OneWaits(), trial, {"summary": {}, "done": True})
    return found


def made(stopping: Asha | Median, earlier: Mapping[str, list[Report]]) -> Any:
    def reports(run: str) -> list[Report]:
        return earlier.get(run, [])

    return stopping.made("val_loss", "min", grace=100, end=10_000, earlier=reports)


both = pytest.mark.parametrize("stopping", [Asha(reduction=2), Median(least_trials=1)], ids=["asha", "median"])


@both
@example(curves=[[4.0] + 7 * [2.0], 8 * [3.0]])  # what comes twice would change the first one's mean, and so the second
@given(curves=st.lists(LOSSES, min_size=1, max_size=6))
def test_a_trial_ends_where_it_would_whichever_start_has_trained_those_before(
    stopping: Asha | Median, curves: list[list[float]]
) -> None:
    at_once = made(stopping, {})
    expected = {str(place): trained(at_once, str(place), curve_of(one)) for place, one in enumerate(curves)}
    for known, losses in enumerate(curves):
        later = made(stopping, expected)
        for place in range(known):
            later.on_trial_add(None, EndedTrial(str(place)))
        assert trained(later, "later", curve_of(losses)) == expected[str(known)]


@both
@given(losses=LOSSES, others=st.lists(LOSSES, max_size=4), killed=st.integers(0, 8))
def test_a_trial_that_goes_on_ends_where_it_would_and_by_nothing_that_it_had_come_past(
    stopping: Asha | Median, losses: list[float], others: list[list[float]], killed: int
) -> None:
    curve, at_once = curve_of(losses), made(stopping, {})
    first = begun(at_once, "first")
    earlier = {"first": reported(at_once, first, curve[:killed])}
    earlier |= {str(place): trained(at_once, str(place), curve_of(one)) for place, one in enumerate(others)}
    again = made(stopping, earlier)
    for place in range(len(others)):
        again.on_trial_add(None, EndedTrial(str(place)))
    assert reported(again, begun(again, "first"), curve[killed:]) == reported(at_once, first, curve[killed:])


def test_a_searchers_trials_may_be_longer_than_the_base_job() -> None:
    known = {"metric": "val_loss", "mode": "min"}
    scheduler = scheduler_for(Asha(), [job(50)], are_all=False, **known)
    base = job(50).plan.layer_tokens(100)
    curve = [{"layer_tokens": times * base, "val_loss": 1.0} for times in (2.0, 50.0, 60.0)]
    assert reported(scheduler, begun(scheduler, "long"), curve) == curve
    with pytest.raises(UserError, match="no trial is validated after a grace of"):
        scheduler_for(Asha(), [job(95)], are_all=False, **known)


def test_a_trial_whose_process_was_lost_is_judged_by_what_it_had_not_reported() -> None:
    earlier: dict[str, list[Report]] = {}
    scheduler = made(Asha(reduction=2), earlier)
    trained(scheduler, "better", curve_of([1.0, 1.0]))
    begun(scheduler, "worse")
    earlier["worse"] = curve_of([2.0])  # recorded, and lost before it was reported
    assert len(reported(scheduler, begun(scheduler, "worse"), curve_of([2.0, 1.5]))) == 1
