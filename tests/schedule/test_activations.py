"""Where layers are computed again in the backward pass: by what a micro batch keeps, and in no other way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import plans, schedules
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.schedule.activations import Activations
from tokendrop.schedule.adaptive import Adaptive
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import KeptByStep
from tokendrop.schedule.micro_batch import MicroBatchGrowth, TokensAtOnce
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import RouteSchedule
from tokendrop.schedule.scaling import with_workers

SHAPE = ModelShape(layers=6, width=8, sequence_length=64, vocab_size=50, mlp_width=32, causal=True)
SPLIT = BatchSplit(global_batch=64, micro_batch=2, world_size=4)
LIMITS = st.integers(15_000, 400_000)  # bytes; a micro batch keeps 63 to 354 kB, or 39 to 93 computed again


@given(schedules(SHAPE.sequence_length), LIMITS)
def test_layers_are_computed_again_where_a_micro_batch_would_keep_too_much(kept: KeptByStep, limit: int) -> None:
    always, never, some = (plan_of(kept, one) for one in (most_bytes(0), most_bytes(2**62), most_bytes(limit)))
    assert all(segment.recomputes for segment in always.segments)
    for again, whole, segment in zip(always.segments, never.segments, some.segments, strict=True):
        assert not whole.recomputes
        assert whole.activation_bytes is not None
        assert again.activation_bytes is not None
        assert segment.recomputes == (whole.activation_bytes > limit)
        assert segment.activation_bytes == (again if segment.recomputes else whole).activation_bytes
        assert again.activation_bytes < whole.activation_bytes


@given(schedules(SHAPE.sequence_length), LIMITS, st.just("auto") | st.integers(1, 5000))
def test_micro_batches_grow_within_the_limit_and_have_no_layer_computed_again(
    kept: KeptByStep, limit: int, tokens: TokensAtOnce
) -> None:
    activations = most_bytes(limit)
    plan = plan_of(kept, activations, tokens)
    for segment, alone in zip(plan.segments, plan_of(kept, activations).segments, strict=True):
        assert segment.recomputes == alone.recomputes
        if segment.recomputes:
            assert segment.most_sequences == SPLIT.micro_batch
            continue
        work = [(2, SPLIT.global_batch, SHAPE.sequence_length), (4, SPLIT.global_batch, segment.kept_length)]
        sizes = {"sequences": segment.most_sequences, "kept": segment.kept_length}
        assert activations.kept_bytes(SHAPE, work, again=False, **sizes) <= limit


@given(plans())
def test_workers_do_not_decide_where_layers_are_computed_again(plan: RunPlan) -> None:
    resized = with_workers(plan, [(0, plan.batch.world_size), *([(plan.steps // 2, 1)] if plan.steps > 1 else [])])
    for segment in resized.segments:
        assert segment.recomputes == plan.at(segment.start).recomputes
        assert segment.activation_bytes == plan.at(segment.start).activation_bytes


def test_flops_and_layer_tokens_are_the_models() -> None:
    plain, again = (experiment(train__activation_checkpointing=one).plan for one in (False, True))
    for segment in again.segments:
        assert replace(segment, recomputes=False) == plain.at(segment.start)


def test_bytes_are_read_in_the_units_that_people_write() -> None:
    of = {"20 GB": 20 * 10**9, "1.5GiB": 3 * 2**29, "300 MB": 3 * 10**8, "1 TiB": 2**40}
    for text, amount in of.items():
        assert job(text).train.activation_limit == amount
    assert [job(one).train.activation_limit for one in (False, True)] == [None, None]


@pytest.mark.parametrize("text", ["auto", "20", "20 gb", "-1 GB", "1e3 GB", "GB", ""])
def test_what_is_no_amount_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^train\.activation_checkpointing: want true, false, or bytes such as 20 GB"):
        job(text)


def test_what_does_not_fit_is_refused_with_what_it_keeps() -> None:
    needed = job("1 MB").plan
    most = max(segment.activation_bytes or 0 for segment in needed.segments)
    assert most < 10**6
    with pytest.raises(UserError) as refused:
        job("0.03 MB")
    assert str(refused.value).startswith("train.activation_checkpointing: from step ")
    assert "even with its layers computed again, got '0.03 MB'; want more, or a smaller" in str(refused.value)


@given(st.floats(0.36, 0.9), st.lists(st.booleans(), min_size=19, max_size=19))
def test_a_kept_length_is_never_decided_larger_than_by_the_latest_growth(budget: float, wants: list[bool]) -> None:
    """What a job is checked by, so that no decision is refused in the middle of a run."""
    clock = Clock(global_batch=1, sequence_length=16, total_steps=20)
    schedule = Adaptive(start=4, increment=4, every=Duration.parse("1 step"), budget=budget)
    most = max(schedule.always(clock, wants=False).decided)
    for grows in wants:
        schedule = replace(schedule, decided=(*schedule.decided, schedule.choices(clock)[grows]))
    assert schedule.next_decision(clock) is None
    assert max(schedule.decided) <= most


def test_what_a_schedule_may_still_decide_has_to_fit_too() -> None:
    """Up to 16 tokens, where 8 are expected."""
    adaptive = {"kind": "adaptive", "start": 4, "increment": 4, "every": "1 step", "budget": 0.35}
    how = {"drop": {"method": "random_ltd", "schedule": adaptive}, "train__length": "20 steps"}
    assert max(segment.kept_length for segment in job("1 TB", **how).plan.segments) == 8
    most = [
        max(segment.activation_bytes or 0 for segment in job("0.21 MB", **fixed).plan.segments)
        for fixed in ({"drop": {"method": "constant", "kept": kept}} for kept in (8, 16))
    ]
    between = f"{sum(most) / 2e6:.4f} MB"
    job(between, drop={"method": "constant", "kept": 8})
    with pytest.raises(UserError, match="even with its layers computed again"):
        job(between, **how)


def test_bytes_want_a_precision_that_no_device_decides() -> None:
    with pytest.raises(UserError, match=r"^train\.activation_checkpointing: .*want precision bf16, fp32 or fp64"):
        job("1 GB", train__precision="auto")


def job(text: str | bool, **changes: object) -> ExperimentConfig:
    return experiment(**{"train__activation_checkpointing": text, **changes})


def most_bytes(limit: int) -> Activations:
    return Activations(limit=limit)


def plan_of(kept: KeptByStep, activations: Activations, tokens: TokensAtOnce | None = None) -> RunPlan:
    """A run whose first and last layer see every token."""
    return build_plan(
        steps=50,
        routes=[RouteSchedule(span=(layer, layer), kept=kept) for layer in range(1, SHAPE.layers - 1)],
        shape=SHAPE,
        batch=SPLIT,
        lr_clock="step",
        warmup_steps=0,
        peak_lr=1.0,
        final_lr=0.0,
        decay="linear",
        growth=MicroBatchGrowth(tokens=tokens, activations=activations),
    )
