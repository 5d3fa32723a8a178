"""The scoreboards: every method on one budget, beside the full length, stopped early, and shallower models."""

from collections import defaultdict
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from sweeps import trials_of
from tokendrop.config.drop import DropConfig, DropMethod, NoDropping
from tokendrop.config.load import load_job
from tokendrop.study.budget import Measure, cost_of

JOBS = Path(__file__).parents[2] / "jobs"
METHODS = [
    method
    for one in get_args(DropConfig)
    if one not in (NoDropping, DropMethod)
    for method in get_args(get_type_hints(one)["method"])
]


@pytest.mark.parametrize("measure", ["flops", "layer_tokens"])
def test_each_method_has_five_seeds_and_takes_what_the_others_take(measure: Measure) -> None:
    trials = trials_of(JOBS / "sweeps" / f"open_scoreboard_{measure}.yaml")
    budget = cost_of(load_job(JOBS / "pretrain" / "quickstart.yaml", ["train.length=800 steps"]), measure)
    seeds: dict[tuple[str, int], set[int]] = defaultdict(set)
    for trial in trials:
        config = trial.config
        seeds[config.drop.method, config.model.layers].add(config.seed)
        cost = cost_of(config, measure)
        assert budget - 1.5 * cost / config.steps <= cost <= budget
    assert {*seeds} == {(method, 4) for method in METHODS} | {("none", layers) for layers in (4, 3, 2)}
    assert {len(some) for some in seeds.values()} == {5}
