"""A duration keeps what was written, exactly."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.schedule.duration import Clock, Duration

amounts = st.decimals(0, 10**15, allow_nan=False, allow_infinity=False, places=6)
units = st.sampled_from(["steps", "tokens", "epochs"])


@given(amounts, units)
def test_an_amount_and_its_unit_are_read_exactly(amount: Decimal, unit: str) -> None:
    assert Duration.parse(f"{amount:f} {unit}") == Duration(Fraction(amount), unit)


@given(amounts, units)
def test_what_is_printed_reads_back_as_the_same_duration(amount: Decimal, unit: str) -> None:
    duration = Duration(Fraction(amount), unit)
    assert Duration.parse(str(duration)) == duration


@given(st.decimals(0, 100, places=9))
def test_a_printed_share_reads_back_as_the_same_share(amount: Decimal) -> None:
    share = Duration(Fraction(amount), "%")
    assert Duration.parse(str(share)) == share


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("350 steps", 350, "steps"),
        ("1 step", 1, "steps"),
        ("1.75e9 tokens", 1_750_000_000, "tokens"),
        ("300_000 TOKENS", 300_000, "tokens"),
        ("15 epochs", 15, "epochs"),
        (" 25e-1% ", Fraction(5, 2), "%"),
        (7, 7, "steps"),
        (0.1, Fraction(1, 10), "steps"),
    ],
)
def test_each_way_to_write_a_duration_is_understood(text: str | float, amount: int, unit: str) -> None:
    assert Duration.parse(text) == Duration(Fraction(amount), unit)


@pytest.mark.parametrize(
    "text",
    [
        *("", "steps", "5 apples", "-5 steps", "1e999 steps", "1.2.3 steps", "101%", "1e19 tokens", "1 steps a day"),
        *(-5, 10**400, 1e300, True, "9" * 5000 + " steps", float("inf"), float("nan")),
    ],
)
def test_anything_else_is_refused_with_a_value_error(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"duration|share|limit"):
        Duration.parse(text)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_tokens_become_steps_without_rounding(steps: int, tokens_per_step: int) -> None:
    duration = Duration(Fraction(steps * tokens_per_step), "tokens")
    assert Clock(global_batch=1, sequence_length=tokens_per_step).steps(duration) == steps


@given(st.integers(1, 100), st.integers(1, 10**6), st.integers(1, 1000))
def test_an_epoch_is_as_many_steps_as_its_samples_fill(epochs: int, samples: int, global_batch: int) -> None:
    clock = Clock(global_batch=global_batch, sequence_length=7, epoch_samples=samples)
    assert clock.steps(Duration.parse(f"{epochs} epochs")) * global_batch == epochs * samples


def test_a_duration_in_an_unknown_unit_is_refused() -> None:
    clock = Clock(global_batch=1, sequence_length=7)
    for text in ("3 epochs", "5%"):
        with pytest.raises(ValueError, match=f"want a length in steps or tokens here, got {text}"):
            clock.steps(Duration.parse(text))


def test_a_share_is_of_the_whole_run() -> None:
    assert Clock(global_batch=1, sequence_length=1, total_steps=160).steps(Duration.parse("70%")) == 112
