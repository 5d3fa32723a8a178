"""Learning rates by step and by layer token."""

from dataclasses import replace
from math import pi
from typing import Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies import plans
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.kept_length import Constant
from tokendrop.schedule.learning_rate import Decay, LearningRate
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import RouteSchedule


@st.composite
def learning_rates(draw: st.DrawFn) -> LearningRate:
    peak, decay_length = draw(st.floats(1e-6, 1.0)), draw(st.integers(0, 100))
    decay = draw(st.sampled_from(["linear", "cosine", "constant", "wsd"]))
    return LearningRate(
        peak=peak,
        final=peak * draw(st.floats(0, 1)),
        warmup=draw(st.integers(0, 100)),
        decay_length=decay_length,
        decay=decay,
        stable=draw(st.integers(0, max(0, decay_length - 1))) if decay == "wsd" else 0,
    )


def consumed(plan: RunPlan, steps: int) -> int:
    """Layer tokens: of one sequence a step, in the letters of appendix C, 2sT + sum of (l - 2) b_t over T steps."""
    whole = plan.shape.layers - len(plan.dropped_layers)
    each = plan.batch.global_batch if plan.routes.counts == "tokens" else plan.shape.sequence_length
    total = steps * whole * plan.tokens_per_step
    for step in range(steps):
        total += each * sum(plan.at(step).kept_by_layer.values())
    return total


def on_the_step_clock(plan: RunPlan, *, warmup_steps: int) -> RunPlan:
    rate = plan.learning_rate
    return replace(
        plan,
        lr_clock="step",
        learning_rate=replace(rate, warmup=warmup_steps, decay_length=plan.steps - warmup_steps),
    )


@given(plans(drops=False, clock="layer_token"))
def test_with_nothing_dropped_layer_token_lr_is_the_step_lr_exactly(plan: RunPlan) -> None:
    by_step = on_the_step_clock(plan, warmup_steps=plan.warmup_steps())
    assert [plan.lr(step) for step in range(plan.steps)] == [by_step.lr(step) for step in range(plan.steps)]


@st.composite
def layer_token_plans(draw: st.DrawFn) -> tuple[RunPlan, int]:
    """A plan on the layer-token clock, and the warm-up in steps that it was made from."""
    plan = draw(plans(clock="layer_token"))
    per_step = plan.batch.global_batch * plan.shape.layers * plan.shape.sequence_length
    warmup, rest = divmod(plan.learning_rate.warmup, per_step)
    assert rest == 0
    return plan, warmup


@given(layer_token_plans())
def test_the_warm_up_lasts_the_layer_tokens_that_it_would_at_full_length(case: tuple[RunPlan, int]) -> None:
    """Appendix C, first equation: 2s T_w + sum of (l - 2) b_t = s l T_warmup, at the first step that reaches it."""
    plan, warmup_steps = case
    right = plan.tokens_per_step * plan.shape.layers * warmup_steps
    solved = plan.warmup_steps()
    assert consumed(plan, solved) >= right
    assert solved == 0 or consumed(plan, solved - 1) < right
    assert solved >= warmup_steps
    if solved and consumed(plan, solved) == right:
        assert plan.lr(solved - 1) == pytest.approx(plan.learning_rate.peak)


@given(layer_token_plans())
def test_the_decay_lasts_all_layer_tokens_after_the_warm_up(case: tuple[RunPlan, int]) -> None:
    """Appendix C, second equation: what the whole run consumes, less what the warm-up does."""
    plan, warmup_steps = case
    warmup = plan.tokens_per_step * plan.shape.layers * warmup_steps
    assert plan.learning_rate.decay_length == consumed(plan, plan.steps) - warmup


@given(plans())
def test_a_run_ends_at_its_final_rate(plan: RunPlan) -> None:
    rate = plan.learning_rate
    assume(rate.final > 0)
    ends_at = rate.peak if rate.decay == "constant" or rate.decay_length == 0 else rate.final
    assert plan.lr(plan.steps - 1) == pytest.approx(ends_at, abs=1e-12)


def decaying_to_zero(plan: RunPlan) -> RunPlan:
    return replace(plan, learning_rate=replace(plan.learning_rate, final=0.0))


@given(plans().map(decaying_to_zero))
def test_a_decay_to_zero_is_over_after_the_last_step_which_trains_too(plan: RunPlan) -> None:
    rates = [plan.lr(step) for step in range(plan.steps)]
    assert min(rates) > 0
    decay = rates[plan.warmup_steps() :]
    assert decay == sorted(decay, reverse=True)
    if plan.learning_rate.decay == "linear" and plan.learning_rate.decay_length:
        last = plan.steps - 1
        consumed = last if plan.lr_clock == "step" else plan.layer_tokens(last)
        end = plan.learning_rate.warmup + plan.learning_rate.decay_length
        left = min(1.0, (end - consumed) / plan.learning_rate.decay_length)
        assert rates[-1] == pytest.approx(plan.learning_rate.peak * left)


@given(plans())
def test_a_rate_above_zero_at_the_end_is_read_from_the_clock_after_each_step(plan: RunPlan) -> None:
    assume(plan.learning_rate.final > 0)
    for step in range(plan.steps):
        after = step + 1 if plan.lr_clock == "step" else plan.layer_tokens(step + 1)
        assert plan.lr(step) == plan.learning_rate.at(after)


@given(plans())
def test_no_step_of_the_warm_up_is_wasted_at_a_rate_of_zero(plan: RunPlan) -> None:
    assert all(plan.lr(step) > 0 for step in range(plan.warmup_steps() - 1))


@given(learning_rates())
def test_the_rate_rises_to_its_peak_and_falls_from_there(rate: LearningRate) -> None:
    rising = [rate.at(clock) for clock in range(rate.warmup + 1)]
    falling = [rate.at(clock) for clock in range(rate.warmup, rate.warmup + rate.decay_length + 1)]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert rising[-1] == falling[0] == pytest.approx(rate.peak)


@given(learning_rates())
def test_the_rate_never_jumps(rate: LearningRate) -> None:
    """Neighbouring clocks differ by no more than the steepest slope of a ramp, a line or half a cosine."""
    steepest = max(1 / max(rate.warmup, 1), pi / 2 / max(rate.decay_length - rate.stable, 1))
    for clock in range(rate.warmup + rate.decay_length + 10):
        jump = abs(rate.at(clock + 1) - rate.at(clock))
        assert jump <= rate.peak * steepest * (1 + 1e-9)


@given(learning_rates(), st.integers(0, 10**9))
def test_after_the_end_the_rate_stays_at_its_last_value(rate: LearningRate, beyond: int) -> None:
    end = rate.warmup + rate.decay_length
    assert rate.at(end + beyond) == rate.at(end)


@pytest.mark.parametrize("clock", ["step", "layer_token"])
@given(st.integers(1, 100), st.integers(1, 100))
def test_a_warm_up_longer_than_the_run_is_refused(clock: str, steps: int, too_long: int) -> None:
    with pytest.raises(ValueError, match="longer than the run"):
        a_plan(clock, steps=steps, warmup_steps=steps + too_long)


@given(st.integers(1, 100), st.integers(1, 100))
def test_a_warm_up_in_layer_tokens_has_the_length_that_the_step_schedule_gives_it(a: int, b: int) -> None:
    steps, warmup_steps = max(a, b), min(a, b)
    plan = a_plan("layer_token", steps=steps, warmup_steps=warmup_steps)
    at_full_length = [plan.batch.global_batch * 4 * 16 for _ in range(warmup_steps)]
    assert plan.learning_rate.warmup == sum(at_full_length)
    assert plan.warmup_steps() == a_plan("step", steps=steps, warmup_steps=warmup_steps).warmup_steps()


@given(st.integers(1, 100), st.integers(1, 16))
def test_dropping_more_does_not_change_the_layer_tokens_of_the_warm_up(warmup_steps: int, kept: int) -> None:
    dropped, whole = (
        a_plan("layer_token", steps=2 * warmup_steps, warmup_steps=warmup_steps, kept=tokens) for tokens in (kept, 16)
    )
    assert dropped.learning_rate.warmup == whole.learning_rate.warmup


def a_plan(
    clock: Literal["step", "layer_token"],
    *,
    steps: int,
    warmup_steps: int,
    kept: int = 16,
    decay: Decay = "linear",
    cooldown_steps: int = 0,
) -> RunPlan:
    """4 layers, 16 tokens."""
    return build_plan(
        steps=steps,
        routes=[RouteSchedule(span=(1, 2), kept=Constant(kept=kept))],
        shape=ModelShape(layers=4, width=8, sequence_length=16, vocab_size=50, mlp_width=32, causal=True),
        batch=BatchSplit(global_batch=6, micro_batch=1, world_size=2),
        lr_clock=clock,
        warmup_steps=warmup_steps,
        peak_lr=1.0,
        final_lr=0.0,
        decay=decay,
        cooldown_steps=cooldown_steps,
    )


def test_a_final_rate_above_the_peak_is_refused() -> None:
    with pytest.raises(ValueError, match="final"):
        LearningRate(peak=0.1, final=0.2, warmup=0, decay_length=1, decay="linear")


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("linear", [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.0, 0.5, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2]),
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("wsd", [0.0, 0.5, 1.0, 1.0, 1.0, 0.6, 0.2]),
    ],
)
def test_a_decay_is_the_one_that_its_name_says(decay: Decay, rates: list[float]) -> None:
    rate = LearningRate(peak=1.0, final=0.2, warmup=4, decay_length=8, decay=decay, stable=4 if decay == "wsd" else 0)
    assert [rate.at(clock) for clock in range(0, 13, 2)] == pytest.approx(rates)


@pytest.mark.parametrize("clock", ["step", "layer_token"])
def test_a_cooldown_begins_so_many_steps_before_the_end_whatever_is_dropped(
    clock: Literal["step", "layer_token"],
) -> None:
    """On the clock of layer tokens, so many as these steps consume at full length, as for the warm-up."""
    for kept in (16, 4):
        rate = a_plan(clock, steps=20, warmup_steps=2, kept=kept).learning_rate
        plan = a_plan(clock, steps=20, warmup_steps=2, kept=kept, decay="wsd", cooldown_steps=5)
        found, unit = plan.learning_rate, 1 if clock == "step" else plan.tokens_per_step * 4
        assert (found.warmup, found.decay_length) == (rate.warmup, rate.decay_length)
        assert found.decay_length - found.stable == 5 * unit
        assert plan.lr(plan.steps - 1) < plan.learning_rate.peak


def test_a_cooldown_longer_than_what_is_left_is_refused_and_so_is_none() -> None:
    with pytest.raises(ValueError, match="warm-up of 4 and the cooldown are longer than the run by 1"):
        a_plan("step", steps=20, warmup_steps=4, decay="wsd", cooldown_steps=17)
    with pytest.raises(ValueError, match="wants a cooldown above 0"):
        a_plan("step", steps=20, warmup_steps=4, decay="wsd", cooldown_steps=0)
