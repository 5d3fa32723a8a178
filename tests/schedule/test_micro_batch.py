"""Micro batches that grow where kept lengths are short: samples, ranks and bounds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED, batch_splits, growths, kept_activations, plans, schedules
from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.schedule.activations import Activations
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.kept_by_step import KeptByStep, Stages
from tokendrop.schedule.micro_batch import NO_GROWTH, MicroBatchGrowth
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import RouteSchedule
from tokendrop.schedule.scaling import step_s, with_workers

SHAPE = ModelShape(layers=6, width=8, sequence_length=64, vocab_size=50, mlp_width=32, causal=True)
AUTO = MicroBatchGrowth(tokens="auto")


@given(batch_splits(), st.integers(0, 200))
def test_merged_micro_batches_fit_and_are_as_large_as_they_can_be(split: BatchSplit, most: int) -> None:
    merged = split.merged(most)
    assert replace(merged, micro_batch=split.micro_batch) == split
    assert split.micro_batch <= merged.micro_batch <= max(most, split.micro_batch)
    larger = [split.micro_batch * some for some in range(1, split.accumulation + 1) if split.accumulation % some == 0]
    assert not [size for size in larger if merged.micro_batch < size <= most]


@given(batch_splits(), st.integers(1, 20))
def test_work_of_a_segment_is_bounded_by_its_growth(split: BatchSplit, kept: int) -> None:
    plan = plan_of(constant(kept), split, MicroBatchGrowth(tokens=48))
    segment = plan.at(0)
    assert segment.micro_batch == split.micro_batch or segment.micro_batch * kept <= 48
    assert segment.micro_batch * segment.accumulation * segment.workers == split.global_batch


@given(batch_splits(), schedules(SHAPE.sequence_length), growths())
def test_fewer_tokens_never_run_in_smaller_micro_batches(
    split: BatchSplit, kept: KeptByStep, growth: MicroBatchGrowth
) -> None:
    segments = plan_of(kept, split, growth).segments
    sizes = [segment.micro_batch for segment in sorted(segments, key=lambda one: one.kept_length)]
    assert sizes == sorted(sizes, reverse=True)


@given(plans(), kept_activations())
def test_full_length_runs_in_the_micro_batches_of_the_job(plan: RunPlan, activations: Activations) -> None:
    growth = MicroBatchGrowth(tokens="auto", activations=activations)
    split, full = plan.batch, plan.shape.sequence_length
    work = [(plan.shape.layers, split.global_batch, full)]
    size = growth.most_sequences(split, plan.shape, work=work, kept=full)
    assert size == split.micro_batch


@given(plans())
def test_a_segment_says_how_its_workers_share_it_out(plan: RunPlan) -> None:
    for workers in {1, plan.batch.world_size}:
        for segment in with_workers(plan, [(0, workers)]).segments:
            split = plan.split(segment, workers)
            assert (segment.workers, segment.micro_batch, segment.accumulation) == (
                workers,
                split.micro_batch,
                split.accumulation,
            )


def test_where_layers_drop_most_the_deepest_model_grows_most() -> None:
    split = BatchSplit(global_batch=64, micro_batch=1, world_size=1)
    sizes = [plan_of(constant(1), split, AUTO, layers=layers).at(0).micro_batch for layers in (2, 6, 24)]
    assert sizes == [1, 2, 8]
    recomputed = plan_of(constant(1), split, replace(AUTO, activations=Activations(recomputed=True)), layers=24)
    assert recomputed.at(0).micro_batch == 1


def test_a_profile_gives_a_step_the_time_of_its_micro_batch() -> None:
    split = BatchSplit(global_batch=4, micro_batch=1, world_size=1)
    alone, grown = (plan_of(constant(16), split, growth) for growth in (NO_GROWTH, MicroBatchGrowth(tokens=64)))
    assert [plan.at(0).accumulation for plan in (alone, grown)] == [4, 1]
    assert step_s(grown, MEASURED, grown.at(0), 1) < step_s(alone, MEASURED, alone.at(0), 1)


def test_whole_sequences_that_stay_let_no_micro_batch_grow() -> None:
    job = experiment(train__tokens_per_micro_batch="auto", drop={"method": "layer_dropout", "keep": 0.1})
    assert {segment.micro_batch for segment in job.plan.segments} == {job.train.micro_batch}


def test_what_can_not_be_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"train\.tokens_per_micro_batch: want at least 1, or auto, got 0"):
        experiment(train__tokens_per_micro_batch=0)
    with pytest.raises(UserError, match=r"tokens_per_micro_batch: .*got 'all'"):
        experiment(train__tokens_per_micro_batch="all")
    with pytest.raises(UserError, match=r"train\.tokens_per_micro_batch: dropout is drawn for each micro batch"):
        experiment(train__tokens_per_micro_batch="auto", model__dropout=0.1)


def constant(kept: int) -> KeptByStep:
    return Stages(stages=((0, kept),))


def plan_of(
    kept: KeptByStep,
    split: BatchSplit,
    growth: MicroBatchGrowth,
    *,
    layers: int = SHAPE.layers,
) -> RunPlan:
    """A run whose first and last layer see every token."""
    routes = [RouteSchedule(span=(layer, layer), kept=kept) for layer in range(1, layers - 1)]
    return build_plan(
        steps=50,
        routes=routes,
        shape=replace(SHAPE, layers=layers),
        batch=split,
        lr_clock="step",
        warmup_steps=0,
        peak_lr=1.0,
        final_lr=0.0,
        decay="linear",
        growth=growth,
    )
