"""A sample of several sequences costs as many times what a sample of one costs."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from strategies import schedules
from tokendrop.config.load import load_job
from tokendrop.config.task import TextClassification
from tokendrop.launch.memory import least_bytes
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.duration import Clock, Duration
from tokendrop.schedule.kept_by_step import KeptByStep
from tokendrop.schedule.kept_length import Constant
from tokendrop.schedule.micro_batch import MicroBatchGrowth, TokensAtOnce
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import Counts, RouteSchedule
from tokendrop.schedule.scaling import estimate

SHAPE = ModelShape(layers=6, width=8, sequence_length=64, vocab_size=50, mlp_width=32, causal=True)
BATCH = BatchSplit(global_batch=6, micro_batch=1, world_size=2, group=2)
STEPS = 50

RACE = load_job(Path(__file__).parents[2] / "jobs/paper/bert_large_race.yaml", ["scaling.profile=a100-40g-8"])
ONE_TEXT = TextClassification(texts=("article", "question"), label="answer", labels=("A", "B", "C", "D"))


def plan_of(schedule: KeptByStep, counts: Counts, growth: MicroBatchGrowth, *, each: int) -> RunPlan:
    return build_plan(
        steps=STEPS,
        routes=[RouteSchedule(span=(layer, layer), kept=schedule) for layer in (1, 2, 4)],
        counts=counts,
        learned=counts == "tokens",
        shape=SHAPE,
        batch=replace(BATCH, sequences_per_sample=each),
        lr_clock="layer_token",
        warmup_steps=5,
        peak_lr=1.0,
        final_lr=0.0,
        decay="linear",
        growth=growth,
    )


kept_by_step = st.tuples(schedules(SHAPE.sequence_length), st.just("tokens")) | st.tuples(
    st.integers(1, BATCH.global_batch).map(lambda kept: Constant(kept=kept)), st.just("sequences")
)


@given(kept_by_step, st.sampled_from([None, "auto"]), st.integers(2, 5))
def test_several_sequences_cost_as_many_times_one(
    case: tuple[KeptByStep, Counts], tokens: TokensAtOnce | None, each: int
) -> None:
    one, several = (plan_of(*case, MicroBatchGrowth(tokens=tokens), each=some) for some in (1, each))
    assert several.tokens_per_step == each * one.tokens_per_step
    assert several.layer_tokens_full == each * one.layer_tokens_full
    assert several.flops_full == each * one.flops_full
    for step in range(STEPS + 1):
        assert several.layer_tokens(step) == each * one.layer_tokens(step)
        assert several.flops(step) == each * one.flops(step)
    assert several.layer_token_saving() == one.layer_token_saving()
    assert several.flops_saving() == one.flops_saving()
    assert [several.lr(step) for step in range(STEPS)] == [one.lr(step) for step in range(STEPS)]
    for of_several, of_one in zip(several.segments, one.segments, strict=True):
        assert of_several.kept_length == of_one.kept_length
        assert of_several.micro_batch == of_one.micro_batch
        assert several.group_share(of_several) == one.group_share(of_one)


@given(st.integers(1, 5), st.integers(0, 4000))
def test_a_micro_batch_grows_to_as_many_tokens_whatever_a_sample_has(each: int, tokens: int) -> None:
    batch = BatchSplit(global_batch=64, micro_batch=1, world_size=1, sequences_per_sample=each)
    growth = MicroBatchGrowth(tokens=tokens)
    work = [(SHAPE.layers, 64 * each, SHAPE.sequence_length)]
    most = growth.most_sequences(batch.in_sequences, SHAPE, work=work, kept=SHAPE.sequence_length)
    samples = batch.merged(most).micro_batch
    assert samples == 1 or samples * each * SHAPE.sequence_length <= tokens


def test_a_length_in_tokens_counts_all_sequences_of_a_sample() -> None:
    clock = Clock(global_batch=8, sequence_length=16, sequences_per_sample=4, epoch_samples=80)
    assert clock.steps(Duration.parse("5120 tokens")) == 10
    assert clock.steps(Duration.parse("1 epoch")) == 10


def test_each_answer_to_choose_from_is_a_sequence() -> None:
    """RACE has four."""
    one, four = replace(RACE, task=ONE_TEXT).plan, RACE.plan
    assert four.steps == one.steps
    assert four.tokens_per_step == RACE.tokens_per_step == 4 * one.tokens_per_step == 32 * 4 * 512
    assert four.layer_tokens(four.steps) == 4 * one.layer_tokens(one.steps)
    assert four.flops(four.steps) == 4 * one.flops(one.steps)


def test_hours_and_memory_are_those_of_as_many_samples_of_one_sequence() -> None:
    profile, samples = RACE.scaling.profile, RACE.data.epoch_samples
    assert profile is not None
    assert samples is not None
    train = replace(
        RACE.train,
        global_batch=4 * RACE.train.global_batch,
        micro_batch=4 * RACE.train.micro_batch,
        activation_checkpointing="20 GB",
    )
    data = replace(RACE.data, epoch_samples=4 * samples)
    one = replace(RACE, task=ONE_TEXT, train=train, data=data)
    four = replace(RACE, train=replace(RACE.train, activation_checkpointing="20 GB"))
    assert estimate(four.plan, profile) == estimate(one.plan, profile)
    assert four.plan.at(0).activation_bytes == one.plan.at(0).activation_bytes
    assert least_bytes(four, workers=1) == least_bytes(one, workers=1)
