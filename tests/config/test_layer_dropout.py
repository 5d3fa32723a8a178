"""Layer dropout as a job names it: what the plan counts is what the loop runs, at any world size."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attempts import lone_worker
from tiny import TOKENS, Rows, assert_same, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.train.loop import accumulate

DROP = {"method": "layer_dropout", "keep": 0.25, "time_constant": "1.5 steps"}


def job(**changes: Any) -> ExperimentConfig:
    return experiment(drop=DROP | changes.pop("drop", {}), train__warmup="0 steps", **changes)


def gradients_of(config: ExperimentConfig, step: int, world_size: int = 1) -> tuple[dict[str, Tensor], Counter[int]]:
    """Mean gradients of a step, and the sequences that each layer ran on, all workers one after the other."""
    total: dict[str, Tensor] = {}
    ran = Counter[int]()
    for rank in range(world_size):
        rows = Rows(config, world_size=world_size, rank=rank)
        parts = lone_worker(config, batches=rows, world_size=world_size)
        for number, block in enumerate(parts.engine.model.blocks):
            count(block, number, ran)
        accumulate(config, config.plan, parts, step)
        for name, parameter in parts.engine.model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad / world_size
    return total, ran


def count(block: nn.Module, number: int, ran: Counter[int]) -> None:
    block.register_forward_pre_hook(lambda _, args: ran.update({number: len(args[0])}))


@pytest.mark.parametrize("by_depth", [True, False])
def test_the_plan_counts_the_sequences_that_layers_run_on(by_depth: bool) -> None:
    config = job(drop={"by_depth": by_depth})
    plan = config.plan
    assert plan.routes.counts == "sequences"
    total = 0
    for step in range(plan.steps):
        _, ran = gradients_of(config, step)
        assert [ran[layer] for layer in range(4)] == [plan.at(step).kept_by_layer[layer] for layer in range(4)]
        assert plan.layer_tokens(step) == total
        total += TOKENS * ran.total()
    assert plan.layer_tokens(plan.steps) == total
    assert plan.at(0).kept_by_layer == dict.fromkeys(range(4), 8)
    last = plan.at(5).kept_by_layer
    assert (last[0] == 8 and last[3] < last[2] < last[1] < 8) if by_depth else (set(last.values()) == {2})


@given(step=st.integers(0, 5), micro=st.sampled_from([1, 2, 8]), world=st.sampled_from([1, 2, 4]))
@settings(max_examples=8)
def test_neither_world_size_nor_micro_batch_changes_what_a_step_computes(step: int, micro: int, world: int) -> None:
    world = min(world, 8 // micro)
    expected, ran = gradients_of(job(), step)
    found, ran_too = gradients_of(job(train__micro_batch=micro), step, world)
    assert ran == ran_too
    assert_same(found, expected, tolerance=1e-10)


def test_the_layer_token_clock_and_flops_follow_the_sequences() -> None:
    half = job(drop={"keep": 0.5, "by_depth": False, "time_constant": None, "full_length_layers": "none"})
    plan = half.plan
    assert plan.layer_token_saving() == 0.5
    assert plan.at(0).kept_length == TOKENS // 2
    assert plan.lr(2) == pytest.approx(experiment(drop={"method": "none"}, train__warmup="0 steps").plan.lr(2))
    head = 2 * TOKENS * 16 * 50
    assert plan.flops(1) - 8 * 3 * head == (plan.flops_full // 6 - 8 * 3 * head) / 2


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ({"keep": 0.0}, "keep: want a share above 0"),
        ({"keep": 1.5}, "keep: want a share above 0 and at most 1, got 1.5"),
        ({"time_constant": "0 steps"}, "time_constant: want more than 0"),
        ({"schedule": {"kind": "constant", "kept": 3}}, "leave out schedule and by_layer"),
        ({"by_layer": {"1": {"kind": "constant", "kept": 3}}}, "leave out schedule and by_layer"),
    ],
)
def test_a_mistake_is_named(drop: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        job(drop=drop)
