"""What paired differences say of a claim."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy import stats

from sweeps import DROPS, trials_of, write_sweep
from tokendrop.errors import UserError
from tokendrop.study.claim import Claim
from tokendrop.study.trials import trials_with
from tokendrop.study.verdict import judged, verdict

differences = st.lists(st.floats(-1, 1), min_size=2, max_size=20)


@given(found=differences, margin=st.floats(-1, 1))
def test_the_interval_is_that_of_scipys_paired_test_and_the_answer_follows_from_it(found, margin):
    said = verdict(found, margin)
    assert said.spread == pytest.approx(stats.tstd(found), abs=1e-12)
    if len(set(found)) > 1:
        interval: Any = stats.ttest_1samp(found, 0.0).confidence_interval(0.95)
        assert (said.low, said.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert said.answer == ("agrees" if said.high < margin else "disagrees" if said.low > margin else "undecided")


@given(found=differences, margin=st.floats(-0.5, 0.5), shift=st.sampled_from([-0.5, 0.25, 2.0]))
def test_what_is_shifted_with_its_margin_has_the_same_answer_unless_it_lies_at_the_edge(found, margin, shift):
    one, other = verdict(found, margin), verdict([value + shift for value in found], margin + shift)
    at_the_edge = min(abs(one.low - margin), abs(one.high - margin)) < 1e-9
    assert at_the_edge or one.answer == other.answer


def test_a_claim_that_is_just_not_true_is_taken_for_true_in_1_of_40_draws():
    chance, draws = default_rng(0), 4000
    agrees = sum(verdict(chance.normal(0.1, 0.03, 5), 0.1).answer == "agrees" for _ in range(draws))
    assert 0.018 < agrees / draws < 0.033


def test_so_many_seeds_as_are_told_decide_and_one_fewer_does_not():
    said = verdict([0.01, 0.03, -0.01, 0.02, 0.0], 0.02)
    assert said.answer == "undecided"

    def answer(seeds: int) -> str:
        """Of so many seeds with the same mean and spread."""
        chance = default_rng(1).normal(size=seeds)
        unit = (chance - chance.mean()) / chance.std(ddof=1)
        return verdict([0.01 + 0.0158113883 * one for one in unit], 0.02).answer

    assert said.seeds_to_decide is not None
    assert answer(said.seeds_to_decide) == "agrees"
    assert answer(said.seeds_to_decide - 1) == "undecided"


def test_no_number_of_seeds_decides_what_lies_on_the_margin():
    assert verdict([0.0, 0.2], 0.1).seeds_to_decide is None


AXES = {"drop": [{"method": "none"}, DROPS], "train.peak_lr": [1e-3, 2e-3]}


def test_arms_are_known_by_their_jobs_and_paired_by_seed(tmp_path: Path) -> None:
    trials = trials_of(write_sweep(tmp_path, axes={"drop": AXES["drop"]}, seeds=3))
    claim = Claim(arm={"drop.method": "random_ltd"}, against={"drop.method": "none"}, margin=0.25)
    losses = {"random_ltd": 3.1, "none": 3.0}
    summaries = {one.run: {"val_loss": losses[one.config.drop.method] + one.config.seed} for one in trials}
    said = judged(claim, trials, summaries, "val_loss", lower=True)
    assert said is not None
    assert (said.answer, said.seeds) == ("agrees", 3)
    assert said.mean == pytest.approx(0.1)
    worse = judged(claim, trials, summaries, "val_loss", lower=False)
    assert worse is not None
    assert worse.mean == pytest.approx(-0.1)
    one_seed = {run: one for run, one in summaries.items() if one["val_loss"] < 1238}
    assert judged(claim, trials, one_seed, "val_loss", lower=True) is None


@pytest.mark.parametrize(("keys", "arms"), [({"drop.method": "none"}, 2), ({"drop.method": "tread"}, 0)])
def test_keys_that_no_single_arm_has_are_refused(tmp_path: Path, complaint: Any, keys: Any, arms: int) -> None:
    claim = {"arm": keys, "against": {"drop.method": "random_ltd", "train.peak_lr": 1e-3}}
    said = complaint("sweep", write_sweep(tmp_path, axes=AXES, seeds=2, claim=claim), "--dry-run")
    assert f"claim.arm: {arms} arms of the sweep have drop.method: {keys['drop.method']}; want keys that one" in said
    with pytest.raises(UserError, match=r"claim\.arm"):
        judged(Claim(**claim), trials_of(write_sweep(tmp_path, axes=AXES, seeds=2)), {}, "val_loss", lower=True)


@pytest.mark.parametrize(
    ("keys", "arms"),
    [({"train.peak_lr": 0.001}, 1), ({"train.peak_lr": "1e-3"}, 1), ({"train.warmup": "0.1 steps"}, 0)],
)
def test_an_arm_is_known_by_its_values_however_they_are_written(
    tmp_path: Path, keys: dict[str, Any], arms: int
) -> None:
    trials = trials_of(write_sweep(tmp_path, axes={"train.peak_lr": [1e-3, 2e-3]}, seeds=2))
    if arms:
        assert {one.config.train.peak_lr for one in trials_with(trials, keys, "arm")} == {0.001}
        return
    with pytest.raises(UserError, match="0 arms of the sweep"):
        trials_with(trials, keys, "arm")


def test_an_arm_is_known_by_a_duration_and_by_a_list(tmp_path: Path) -> None:
    linear = {"kind": "linear", "start": 8, "until": "3.0 steps", "increment": 8}
    drops = [{"method": "random_ltd", "full_length_layers": [0], "schedule": linear}, {"method": "none"}]
    trials = trials_of(write_sweep(tmp_path, axes={"drop": drops}, seeds=2))
    for keys in ({"drop.schedule.until": "3 steps"}, {"drop.full_length_layers": [0], "drop.method": "random_ltd"}):
        assert len(trials_with(trials, keys, "arm")) == 2
