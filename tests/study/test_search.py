"""What a searcher chooses, and what it is told."""

import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml
from ray.tune.search import Searcher
from ray.tune.utils import flatten_dict

from corpora import tiny_job
from tokendrop.study.search import ArmSearch
from tokendrop.study.sweep import load_sweep
from tokendrop.study.trainable import FAILURE, SUMMARY
from tokendrop.study.trials import Trial, TrialMaker

AXES = {
    "train.peak_lr": {"kind": "log_uniform", "low": 1e-4, "high": 1e-1},
    "model.layers": [1, 2, 3],
    "train.final_lr": {"kind": "uniform", "low": 0, "high": 1e-5, "when": {"model.layers": 3}},
}


class Sweep:
    """A searched sweep whose trials come to their end in the order in which they begin."""

    def __init__(self, folder: Path, remembered: Any = (), known: Any = None, **keys: Any) -> None:
        tiny_job(folder, ["corpus"])
        path = folder / "sweep.yaml"
        tree = {"base": "job.yaml", "name": "tiny", "axes": AXES, "searcher": {"arms": 8}, **keys}
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        sweep = load_sweep(path)
        self.trials: dict[str, Trial] = {}
        self.trained: list[Trial] = []
        self.chosen: list[dict[str, Any]] = []
        self.known = known or {}
        self.search = ArmSearch(
            sweep,
            TrialMaker(sweep, path),
            begin=self._begin,
            remember=lambda chosen: setattr(self, "chosen", [*chosen]),
            remembered=remembered,
        )

    def _begin(self, trial: Trial) -> float | None:
        self.trials[trial.run] = trial
        return self.known.get(trial.run)

    def train(self, loss: Any, *, most: int = 1000) -> list[Trial]:
        while len(self.trained) < most:
            name = f"tune-{len(self.trained)}"
            found = self.search.suggest(name)
            if found == Searcher.FINISHED:
                break
            self.trained.append(self.trials[found["run"]])
            told = loss(self.trained[-1])
            self.search.on_trial_complete(name, told and flatten_dict(told))  # as Tune calls it
        return self.trained

    def told(self) -> list[Any]:
        """Values of the arms, as Optuna has them; None for one that has failed."""
        return [one.value for one in self.search._study.trials]


def by_rate(trial: Trial) -> dict[str, Any]:
    """Best at a rate of 0.01, a little worse with a higher seed."""
    loss = abs(math.log10(trial.config.train.peak_lr) + 2) + 0.01 * (trial.config.seed - 1234)
    return {SUMMARY: {"val_loss": loss}}


def test_each_arm_is_trained_with_all_seeds_and_told_once_by_their_mean(tmp_path):
    sweep = Sweep(tmp_path, seeds=3)
    trials = sweep.train(by_rate)
    assert [one.config.seed for one in trials] == [1234, 1235, 1236] * 8
    arms = [trials[first].config.train.peak_lr for first in range(0, 24, 3)]
    assert sweep.told() == pytest.approx([abs(math.log10(rate) + 2) + 0.01 for rate in arms])
    assert len({one.run for one in trials}) == 24
    assert all(("train.final_lr" in dict(one.point)) == (one.config.model.layers == 3) for one in trials)


def test_later_arms_are_nearer_to_the_best_than_those_that_are_drawn(tmp_path):
    axes = {"train.peak_lr": AXES["train.peak_lr"]}
    trials = Sweep(tmp_path, axes=axes, searcher={"arms": 40, "startup": 10}).train(by_rate)
    losses = [by_rate(one)[SUMMARY]["val_loss"] for one in trials]
    assert median(losses[20:]) < 0.75 * median(losses[:10])


@pytest.mark.parametrize("trained", [0, 1, 5, 12, 24])
def test_a_search_that_was_ended_goes_on_with_the_arms_that_it_had(tmp_path, trained):
    first = Sweep(tmp_path, seeds=3)
    done = {one.run: by_rate(one)[SUMMARY]["val_loss"] for one in first.train(by_rate, most=trained)}
    second = Sweep(tmp_path, seeds=3, remembered=first.chosen, known=done)
    trials = second.train(by_rate)
    assert second.chosen[: len(first.chosen)] == first.chosen
    assert not {one.run for one in trials} & set(done)
    assert len(trials) + len(done) == 24
    assert second.told()[: trained // 3] == first.told()[: trained // 3]


@pytest.mark.parametrize("again", [0, 1, 5])
def test_a_search_that_was_ended_twice_has_forgotten_no_arm(tmp_path, again):
    first = Sweep(tmp_path)
    first.train(by_rate)
    second = Sweep(tmp_path, remembered=first.chosen)  # none of whose trials it is told to have ended
    second.train(by_rate, most=again)
    assert (second.chosen or first.chosen) == first.chosen
    third = Sweep(tmp_path, remembered=second.chosen or first.chosen)
    assert {one.run for one in third.train(by_rate)} == {one.run for one in first.trained}


def test_what_was_chosen_stays_what_it_was_where_axes_have_other_values_before_it(tmp_path):
    layers = {"model.layers": [2, 3], "train.peak_lr": [1e-3, 1e-2]}
    first = Sweep(tmp_path, axes=layers, searcher={"arms": 4})
    before = {one.run for one in first.train(by_rate)}
    more = Sweep(tmp_path, axes={**layers, "model.layers": [1, 2, 3]}, searcher={"arms": 4}, remembered=first.chosen)
    assert {one.run for one in more.train(by_rate)} == before
    fewer = Sweep(tmp_path, axes={**layers, "model.layers": [3]}, searcher={"arms": 4}, remembered=first.chosen)
    assert {one.config.model.layers for one in fewer.train(by_rate)} == {3}


def test_values_that_do_not_go_together_are_no_arm_and_end_no_search(tmp_path, capsys):
    axes = {"model.width": [32, 48], "model.heads": [2, 3]}
    sweep = Sweep(tmp_path, axes=axes, searcher={"arms": 4})
    trials = sweep.train(by_rate)
    assert sorted((one.config.model.width, one.config.model.heads) for one in trials) == [(32, 2), (48, 2), (48, 3)]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed")]
    assert len(said) == 1
    assert "trial (width 32, heads 3)" in said[0]


def test_an_arm_with_a_failed_seed_has_failed_and_one_that_was_ended_early_has_what_it_came_to(tmp_path):
    ends = iter([{FAILURE: "out of memory"}, {SUMMARY: {"val_loss": 1.0}}, {"val_loss": 3.0}, {"val_loss": 5.0}, None])
    sweep = Sweep(tmp_path, seeds=2)
    sweep.train(lambda trial: next(ends, {SUMMARY: {"val_loss": 2.0}}))
    assert sweep.told() == [None, 4.0, None, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_axes_with_fewer_points_end_the_search_early(tmp_path):
    trials = Sweep(tmp_path, axes={"model.layers": [1, 2, 3]}).train(by_rate)
    assert sorted(one.config.model.layers for one in trials) == [1, 2, 3]
