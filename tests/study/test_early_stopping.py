"""From where on trials are compared, and which sweeps leave no room for that."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
