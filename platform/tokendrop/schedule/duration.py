"""Lengths of training, written in steps, tokens, epochs or as a share of the run, and what turns them into steps."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, Literal

Unit = Literal["steps", "tokens", "epochs", "%"]

_TEXT = re.compile(
    r"(?P<amount>[0-9][0-9_]*(\.[0-9_]*)?(e[+-]?[0-9]{1,2})?)\s*(?P<unit>steps?|tokens?|epochs?|%)", re.IGNORECASE
)
_UNITS: dict[str, Unit] = {"s": "steps", "t": "tokens", "e": "epochs", "%": "%"}
_MOST = 10**18  # more than any run; larger numbers are slips, and costly as exact fractions


@dataclass(frozen=True, slots=True)
class Duration:
    """`350 steps`, `1.75e9 tokens`, `3 epochs` or `70%` of the run; kept exact, so that jumps never drift."""

    amount: Fraction
    unit: Unit

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise ValueError(f"a duration can't be negative, got {self.amount} {self.unit}")
        if self.amount > _MOST:
            raise ValueError(f"a duration can't exceed {_MOST:g} {self.unit}")
        if self.unit == "%" and self.amount > 100:
            raise ValueError(f"a share of the run can't exceed 100%, got {float(self.amount):g}%")

    @classmethod
    def parse(cls, text: str | int | float) -> "Duration":
        """Read a duration; a bare number counts steps.

        Raises:
            ValueError: the text is no duration.
        """
        is_number = isinstance(text, (int, float)) and not isinstance(text, bool)
        match = _TEXT.fullmatch(f"{text!r} steps" if is_number else str(text).strip())
        if match is None:
            raise ValueError(f"want a duration such as '350 steps', '1.75e9 tokens', '3 epochs' or '70%', got {text!r}")
        amount = Fraction(match["amount"].replace("_", ""))
        return cls(amount, _UNITS[match["unit"][0].lower()])

    def __str__(self) -> str:
        number = f"{float(self.amount):.12g}"
        if Fraction(number) != self.amount:
            number = _decimal(self.amount)
        return f"{number}%" if self.unit == "%" else f"{number} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A run's sizes: what turns durations into steps."""

    global_batch: int
    """Samples of one step."""
    sequence_length: int
    sequences_per_sample: int = 1
    total_steps: int = 0
    """Length of the run; 0 where that is not known yet, nor a share of it."""
    epoch_samples: int | None = None
    """Training samples of an epoch; needed for a length in epochs."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all workers."""
        return self.global_batch * self.sequences_per_sample * self.sequence_length

    def steps(self, duration: Duration) -> Fraction:
        """A duration in optimizer steps, not rounded.

        Raises:
            ValueError: it is in a unit of which the size is not known.
        """
        sizes: dict[Unit, Fraction | int | None] = {
            "steps": 1,
            "tokens": Fraction(1, self.tokens_per_step),
            "epochs": self.epoch_samples and Fraction(self.epoch_samples, self.global_batch),
            "%": Fraction(self.total_steps, 100) if self.total_steps else None,
        }
        size = sizes[duration.unit]
        if size is None:
            known = " or ".join(unit for unit, value in sizes.items() if value is not None)
            raise ValueError(f"want a length in {known} here, got {duration}")
        return duration.amount * size


def durations(value: Any) -> Iterator[Duration]:
    """All durations in a dataclass, in those below it and in tuples and mappings of them."""
    if isinstance(value, Duration):
        yield value
        return
    below: list[Any] = []
    if is_dataclass(value):
        below = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, tuple | Mapping):
        below = [*(value.values() if isinstance(value, Mapping) else value)]
    for one in below:
        yield from durations(one)


def _decimal(amount: Fraction) -> str:
    """All digits of a decimal fraction, so that reading it back gives the same amount."""
    with localcontext() as context:
        context.prec = len(str(amount.numerator)) + 4 * len(str(amount.denominator))
        return f"{Decimal(amount.numerator) / Decimal(amount.denominator):f}"
