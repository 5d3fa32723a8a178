"""From where on trials are compared, and which sweeps leave no room for that."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.schedulers import TrialScheduler

from tiny import TOKENS, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.study.early_stopping import Asha, Median, scheduler_for


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

    def made(self, metric: str, mode: str, *, grace: int, end: int) -> tuple[int, int]:
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


Curve = list[dict[str, float]]

CURVES = st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), min_size=8, max_size=8), min_size=1, max_size=6)


@dataclass(frozen=True)
class LiveTrial:
    trial_id: str


class NoneWait:
    def get_live_trials(self) -> list[LiveTrial]:
        return []


def curve_of(losses: list[float]) -> Curve:
    return [{"layer_tokens": 100 * place, "val_loss": loss} for place, loss in enumerate(losses, 1)]


def trained(scheduler: Any, name: str, curve: Curve) -> Curve:
    """As much of a curve as a trial reports, until it is ended; each report comes twice, as after a lost process."""
    trial, controller = LiveTrial(name), NoneWait()
    scheduler.on_trial_add(controller, trial)
    for place, report in enumerate(curve, 1):
        decisions = [scheduler.on_trial_result(controller, trial, report) for _ in range(2)]
        if TrialScheduler.STOP in decisions[:1]:
            return curve[:place]
        assert TrialScheduler.STOP not in decisions
    return curve


@given(curves=CURVES)
@pytest.mark.parametrize("stopping", [Asha(reduction=2), Median(least_trials=1)], ids=["asha", "median"])
def test_a_trial_ends_where_it_would_whichever_start_has_trained_those_before(
    stopping: Asha | Median, curves: list[list[float]]
) -> None:
    def made() -> Any:
        return stopping.made("val_loss", "min", grace=100, end=10_000)

    at_once = made()
    expected = [trained(at_once, str(place), curve_of(losses)) for place, losses in enumerate(curves)]
    for known in range(len(curves)):
        later = made()
        for place, curve in enumerate(expected[:known]):
            stopping.recall(later, str(place), curve)
        assert trained(later, "later", curve_of(curves[known])) == expected[known]
