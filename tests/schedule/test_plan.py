"""A plan's closed forms, against sums over its steps."""

from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import plans, schedules
from tokendrop.config.load import load_job
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.kept_by_step import KeptByStep
from tokendrop.schedule.kept_length import Constant
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import Counts, RouteSchedule

PAPER = Path(__file__).parents[2] / "jobs" / "paper"
SHAPE = ModelShape(layers=6, width=8, sequence_length=64, vocab_size=50, mlp_width=32, causal=True)
BATCH = BatchSplit(global_batch=6, micro_batch=1, world_size=2)
RATE = {"warmup_steps": 0, "peak_lr": 1.0, "final_lr": 0.0, "decay": "linear"}


def seen_at(plan: RunPlan, step: int, layer: int) -> tuple[int, int]:
    """Sequences that a layer runs on, and tokens of each."""
    every, length = plan.batch.global_batch, plan.shape.sequence_length
    kept = plan.at(step).kept_by_layer.get(layer)
    if kept is None:
        return every, length
    return (every, kept) if plan.routes.counts == "tokens" else (kept, length)


def layer_tokens_of_step(plan: RunPlan, step: int) -> int:
    """Counted one layer at a time."""
    seen = [seen_at(plan, step, layer) for layer in range(plan.shape.layers)]
    return sum(sequences * tokens for sequences, tokens in seen)


def flops_of_step(plan: RunPlan, step: int) -> int:
    """Counted one layer at a time, a layer being what a model of that one layer adds."""
    shape = plan.shape
    whole = shape.flops(kept=shape.sequence_length, dropped_layers=0)
    head = whole - shape.layers * one_layer(shape, shape.sequence_length)
    seen = [seen_at(plan, step, layer) for layer in range(shape.layers)]
    return plan.batch.global_batch * head + sum(sequences * one_layer(shape, tokens) for sequences, tokens in seen)


def one_layer(shape: ModelShape, tokens: int) -> int:
    """Training FLOPs of a layer: a multiply and an add for each weight, and twice for each attended pair."""
    weights = 4 * shape.width * shape.width + 2 * shape.width * shape.mlp_width
    pairs = sum(token + 1 for token in range(tokens)) if shape.causal else tokens * tokens
    forward = 2 * weights * tokens + 2 * (2 * shape.width * pairs)
    return 3 * forward


@given(plans())
def test_segments_tile_the_run_without_gap_or_overlap(plan: RunPlan) -> None:
    assert plan.segments[0].start == 0
    assert all(one.stop == two.start for one, two in pairwise(plan.segments))
    assert all(segment.start < segment.stop for segment in plan.segments)
    assert plan.segments[-1].stop == plan.steps


@given(st.lists(schedules(SHAPE.sequence_length), min_size=3, max_size=3), st.integers(1, 200))
def test_each_step_lies_in_a_segment_of_its_kept_lengths(by_route: list[KeptByStep], steps: int) -> None:
    spans = ((0, 1), (3, 3), (4, 5))
    routes = [RouteSchedule(span=span, kept=kept) for span, kept in zip(spans, by_route, strict=True)]
    plan = build_plan(steps=steps, routes=routes, shape=SHAPE, batch=BATCH, lr_clock="step", **RATE)
    for step in range(steps):
        segment, (one, two, three) = plan.at(step), (kept.at(step) for kept in by_route)
        assert segment.start <= step < segment.stop
        assert segment.kept_by_route == {0: one, 3: two, 4: three}
        assert segment.kept_by_layer == {0: one, 1: one, 3: two, 4: three, 5: three}
        assert abs(segment.kept_length - (2 * one + two + 2 * three) / 5) <= 0.5
    assert all(one.kept != two.kept for one, two in pairwise(plan.segments))


@given(schedules(SHAPE.sequence_length), st.integers(1, 200))
def test_one_schedule_for_all_layers_is_told_by_one_number(schedule: KeptByStep, steps: int) -> None:
    routes = [RouteSchedule(span=(layer, layer), kept=schedule) for layer in (1, 2, 4)]
    plan = build_plan(steps=steps, routes=routes, shape=SHAPE, batch=BATCH, lr_clock="step", **RATE)
    for step in range(steps):
        assert plan.at(step).kept_length == schedule.at(step)


@given(plans())
def test_layer_tokens_are_the_sum_over_the_steps_before(plan: RunPlan) -> None:
    total = 0
    for step in range(plan.steps):
        assert plan.layer_tokens(step) == total
        total += layer_tokens_of_step(plan, step)
    assert plan.layer_tokens(plan.steps) == total
    assert plan.layer_token_saving() == pytest.approx(1 - total / plan.layer_tokens_full, abs=1e-12)


@given(plans())
def test_flops_are_the_sum_over_the_steps_before(plan: RunPlan) -> None:
    total = 0
    for step in range(plan.steps):
        assert plan.flops(step) == total
        total += flops_of_step(plan, step)
    assert plan.flops(plan.steps) == total
    assert plan.flops_saving() == pytest.approx(1 - total / plan.flops_full, abs=1e-12)


@given(plans())
def test_what_is_saved_is_saved_by_the_dropped_layers(plan: RunPlan) -> None:
    full = plan.steps * plan.batch.global_batch * plan.shape.sequence_length
    saved = plan.layer_tokens_full - plan.layer_tokens(plan.steps)
    assert plan.dropped_layer_token_saving() * len(plan.dropped_layers) * full == pytest.approx(saved)


@given(plans(drops=False))
def test_nothing_is_saved_when_nothing_is_dropped(plan: RunPlan) -> None:
    assert plan.layer_token_saving() == plan.dropped_layer_token_saving() == plan.flops_saving() == 0
    assert len(plan.segments) == 1


@given(plans())
def test_a_step_outside_of_the_run_is_refused(plan: RunPlan) -> None:
    for step in (-1, plan.steps):
        with pytest.raises(ValueError, match="want a step"):
            plan.at(step)


@pytest.mark.parametrize(("kept", "dropped_layers"), [(0, 2), (65, 2), (8, -1), (8, 7)])
def test_costs_outside_of_their_range_are_refused(kept: int, dropped_layers: int) -> None:
    with pytest.raises(ValueError, match="want"):
        SHAPE.flops(kept=kept, dropped_layers=dropped_layers)


@pytest.mark.parametrize(("counts", "kept"), [("tokens", 65), ("sequences", 7)])
def test_more_than_there_is_can_not_stay(counts: Counts, kept: int) -> None:
    routes = [RouteSchedule(span=(1, 2), kept=Constant(kept=kept))]
    with pytest.raises(ValueError, match=f"got {kept}"):
        build_plan(steps=3, routes=routes, counts=counts, shape=SHAPE, batch=BATCH, lr_clock="step", **RATE)


def test_a_run_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        build_plan(
            steps=0,
            routes=(),
            shape=SHAPE,
            batch=BATCH,
            lr_clock="step",
            **RATE,
        )


@pytest.mark.parametrize(
    ("job", "percent", "places"),
    [
        ("bert_large_ltd1", 26.23, 2),
        ("bert_large_ltd2", 31.1, 1),
        ("bert_large_ltd3", 14.1, 1),
        ("bert_large_ltd4", 22.3, 1),
        ("gpt3_350m_ltd", 30.3, 1),
        ("gpt3_1.3b_ltd", 30.3, 1),
        ("gpt3_350m_ltd_step_lr", 30.3, 1),
        ("bert_large_ltd3_step_lr", 14.1, 1),
        ("gpt3_350m_baseline", 0, 12),
        ("vit_imagenet_ltd", 22.3, 1),
        ("vit_cifar10_ltd", 30.9, 1),
        ("vit_cifar100_ltd", 30.9, 1),
    ],
)
def test_the_papers_settings_save_what_the_paper_says(job: str, percent: float, places: int) -> None:
    assert round(100 * load_job(PAPER / f"{job}.yaml").plan.layer_token_saving(), places) == percent


@pytest.mark.parametrize(
    ("job", "samples", "percent"),
    [("gpt2_ptb_ltd", 1060, 32.4), ("gpt2_wikitext2_ltd", 2300, 30.4), ("gpt2_wikitext103_ltd", 115_000, 30.3)],
)
def test_a_length_in_epochs_is_planned_once_its_samples_are_known(job: str, samples: int, percent: float) -> None:
    """22 of 24 layers, from an eighth or a sixteenth of the length over 80 or 70% of the run."""
    plan = load_job(PAPER / f"{job}.yaml", [f"data.epoch_samples={samples}"]).plan
    assert round(100 * plan.layer_token_saving(), 1) == percent


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_setting_of_the_paper_saves_where_it_drops_tokens(path: Path) -> None:
    """Its name tells; GPT-2's epochs are of any number of samples."""
    plan = load_job(path, ["data.epoch_samples=5000"] if path.stem.startswith("gpt2") else []).plan
    assert (plan.layer_token_saving() > 0) == ("_ltd" in path.stem)


@pytest.mark.parametrize(
    ("job", "epochs", "batch", "rate"),
    [
        ("bert_large_mnli", 10, 128, 1e-5),
        ("bert_large_qqp", 12, 128, 5e-5),
        ("bert_large_race", 3, 32, 2e-5),
        ("bert_large_race_test", 3, 32, 2e-5),
        ("bert_large_mnli_30_epochs", 30, 128, 5e-5),
        ("bert_large_qqp_30_epochs", 30, 128, 5e-5),
        ("bert_large_race_30_epochs", 30, 64, 2e-5),
    ],
)
def test_bert_is_finetuned_as_the_paper_finetunes_it(job: str, epochs: int, batch: int, rate: float) -> None:
    """Appendix D.2."""
    config = load_job(PAPER / f"{job}.yaml")
    assert config.data.epoch_samples is not None
    assert config.plan.batch.global_batch == batch
    assert config.plan.steps == ceil(epochs * config.data.epoch_samples / batch)
    assert config.plan.learning_rate.peak == rate


@pytest.mark.parametrize("job", ["gpt3_350m_ltd", "gpt3_1.3b_ltd"])
def test_the_papers_third_is_saved_over_the_dropped_layers_alone(job: str) -> None:
    plan = load_job(PAPER / f"{job}.yaml").plan
    assert round(100 * plan.dropped_layer_token_saving(), 1) == 33.1
    assert len(plan.dropped_layers) == plan.shape.layers - 2
