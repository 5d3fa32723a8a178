"""A DeepSpeed config as a job: as many tokens at every step as its own scheduler keeps, keys that mean the same."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deepspeed_configs import imported, theirs
from tokendrop.config.deepspeed_kept import FixedLinear, schedule_of

SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, int]:
    increment = draw(st.sampled_from([1, 2, 3, 7, 8, 16]))
    least = draw(st.integers(increment, 4 * increment) | st.integers(1, 4).map(lambda times: times * increment))
    most = draw(st.integers(least, 120) if least < 120 else st.just(least))
    most = most if draw(st.booleans()) else least + (most - least) // increment * increment
    return {"least": least, "most": max(most, 5), "steps": draw(st.integers(1, 300)), "increment": increment}


@SAME_FILE
@given(schedules(), st.sets(st.integers(0, 11)), st.integers(1, 3))
def test_deepspeed_s_own_scheduler_keeps_as_many_tokens_at_every_step(
    tmp_path: Path, values: dict[str, int], dropped: set[int], workers: int
) -> None:
    scheduler_of = pytest.importorskip("deepspeed.runtime.data_pipeline.data_routing.scheduler").RandomLTDScheduler
    length = 2 * values["steps"] + 20
    tree = theirs(
        train_batch_size=8 * workers,
        scheduler__params__total_num_steps=length,
        LTD__random_ltd_layer_id=[*dropped],
        LTD__random_ltd_layer_num=len(dropped),
        LTD__random_ltd_schedule__min_value=values["least"],
        LTD__random_ltd_schedule__max_value=values["most"],
        LTD__random_ltd_schedule__schedule_config={
            "require_steps": values["steps"],
            "seq_per_step": values["increment"],
        },
    )
    config, _ = imported(tmp_path, tree)
    ltd = tree["data_efficiency"]["data_routing"]["random_ltd"]
    real, plan = scheduler_of({**ltd, "global_batch_size": 8 * workers}), config.plan
    assert plan.dropped_layers == tuple(sorted(dropped))
    assert plan.steps == length
    for step in range(length):
        real.update_seq(step)
        kept = real.get_current_seq()
        assert plan.at(step).kept == (kept,) * len(dropped)
        assert plan.layer_tokens(step + 1) == real.state["consumed_layer_tokens"]


@given(schedules())
def test_stages_are_where_the_kept_length_changes(values: dict[str, int]) -> None:
    schedule = FixedLinear(**values)
    stages = dict(schedule.stages())
    kept, by_step = 0, []
    for step in range(max(stages) + 9):
        kept = stages.get(step, kept)
        by_step.append(kept)
    assert by_step == [schedule.at(step) for step in range(len(by_step))]
    assert by_step[-1] == schedule.most


def test_a_rule_is_written_where_there_is_one_and_stages_where_roundings_differ() -> None:
    exact = {"kind": "linear", "start": 128, "until": "200000 steps", "increment": 16}
    assert schedule_of(FixedLinear(least=128, most=2048, steps=200_000, increment=16)) == (exact, False)
    for odd in (
        {"least": 66, "most": 197, "steps": 1000, "increment": 16},
        {"least": 10, "most": 98, "steps": 61, "increment": 9},
    ):
        keys, is_outright = schedule_of(FixedLinear(**odd))
        assert (keys["kind"], is_outright) == ("piecewise", True)
    constant = {"kind": "constant", "kept": 64}
    assert schedule_of(FixedLinear(least=64, most=64, steps=9, increment=16)) == (constant, False)


def test_each_key_comes_to_the_one_that_means_the_same(tmp_path: Path) -> None:
    config, notes = imported(tmp_path, theirs())
    train = config.train
    assert (config.seed, config.steps, config.model.layers) == (7, 150, 12)
    assert config.model.shape.sequence_length == 64
    assert (train.global_batch, train.micro_batch, config.scaling.workers) == (64, 4, 8)
    assert config.plan.batch.accumulation == 2
    assert (train.peak_lr, train.weight_decay, train.beta1, train.beta2, train.epsilon) == (1e-3, 0.2, 0.9, 0.95, 1e-9)
    assert (train.decay, str(train.warmup), train.final_lr, train.lr_clock) == ("linear", "10 steps", 0.0, "step")
    assert (train.precision, train.strategy, train.zero_stage, train.max_grad_norm) == ("bf16", "deepspeed", 2, 1.0)
    assert config.drop.method == "random_ltd"
    assert "zero_optimization.overlap_comm: no counterpart; left out" in notes


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"bf16": None}, {"precision": "fp32"}),
        ({"bf16": None, "fp16": {"enabled": True}}, {"precision": "auto"}),
        ({"zero_optimization": None}, {"strategy": "ddp", "zero_stage": None}),
        ({"gradient_clipping": None}, {"max_grad_norm": 1e9}),
        (
            {"optimizer__type": "Adam", "optimizer__params__weight_decay": None},
            {"weight_decay": 0.0, "optimizer": "adamw"},
        ),
        ({"optimizer__params__weight_decay": None, "optimizer__params__torch_adam": True}, {"weight_decay": 0.01}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8}}}, {"optimizer": "sgd", "momentum": 0.8}),
        ({"scheduler__type": "WarmupCosineLR"}, {"decay": "cosine", "peak_lr": 2e-3, "final_lr": 2e-3 * 1e-4}),
        (
            {"scheduler__type": "WarmupLR", "scheduler__params__warmup_max_lr": 0.5},
            {"decay": "constant", "peak_lr": 0.5},
        ),
        ({"scheduler__type": "WarmupLR"}, {"decay": "constant", "peak_lr": 2e-3}),
        ({"scheduler__params__warmup_max_lr": "auto"}, {"decay": "linear", "peak_lr": 2e-3}),
        ({}, {"decay": "linear", "peak_lr": 1e-3}),  # WarmupDecayLR has a rate of its own
        ({"scheduler__type": "OneCycle"}, {"decay": "constant", "peak_lr": 2e-3}),
        ({"scheduler": None}, {"decay": "constant"}),
        ({"optimizer": None}, {"optimizer": "adamw", "peak_lr": 1e-3}),
        ({"optimizer": None, "scheduler": None}, {"optimizer": "adamw", "peak_lr": 3e-4}),
        ({"train_batch_size": "auto"}, {"global_batch": 8, "micro_batch": 4}),
        ({"train_batch_size": None, "LTD__global_batch_size": 32}, {"global_batch": 8}),
        ({"gradient_accumulation_steps": None}, {"global_batch": 64, "micro_batch": 4}),
        ({"train_micro_batch_size_per_gpu": None}, {"global_batch": 64, "micro_batch": 32}),
        ({"LTD__layer_token_lr_schedule__enabled": True}, {"lr_clock": "layer_token"}),
    ],
    ids=str,
)
def test_what_is_left_out_or_another_is_as_deepspeed_takes_it(
    tmp_path: Path, changes: dict[str, Any], found: dict[str, Any]
) -> None:
    train = imported(tmp_path, theirs(**changes))[0].train
    assert {key: getattr(train, key) for key in found} == found


@SAME_FILE
@given(st.integers(1, 64 * 12 * 64 * 300), st.integers(0, 64 * 12 * 64 * 3))
def test_a_length_in_layer_tokens_is_reached_by_the_last_step(tmp_path: Path, total: int, warmup: int) -> None:
    changes = {"enabled": True, "total_layer_tokens": total, "warmup_layer_tokens": warmup}
    assume(warmup < total / 2)
    config, _ = imported(tmp_path, theirs(LTD__layer_token_lr_schedule=changes))
    plan = config.plan
    assert plan.layer_tokens(plan.steps - 1) < total <= plan.layer_tokens(plan.steps)
    assert abs(plan.learning_rate.warmup - warmup) <= 64 * 12 * 64 / 2
