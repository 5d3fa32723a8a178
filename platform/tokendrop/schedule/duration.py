"""Lengths of training, written in steps, in tokens or as a share of the run, and what turns them into steps."""

import re
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Literal

_TEXT = re.compile(
    r"(?P<amount>[0-9][0-9_]*(\.[0-9_]*)?(e[+-]?[0-9]{1,2})?)\s*(?P<unit>steps?|tokens?|%)", re.IGNORECASE
)
_MOST = 10**18  # more than any run; larger numbers are slips, and costly as exact fractions


@dataclass(frozen=True, slots=True)
class Duration:
    """`350 steps`, `1.75e9 tokens` or `70%` of the run; kept exact, so that jumps never drift."""

    amount: Fraction
    unit: Literal["steps", "tokens", "%"]

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
            raise ValueError(f"want a duration such as '350 steps', '1.75e9 tokens' or '70%', got {text!r}")
        unit = match["unit"].lower().rstrip("s")
        amount = Fraction(match["amount"].replace("_", ""))
        return cls(amount, "%" if unit == "%" else "tokens" if unit == "token" else "steps")

    def steps(self, *, tokens_per_step: int, total_steps: int | None = None) -> Fraction:
        """The same length in optimizer steps, not rounded.

        Args:
            tokens_per_step: global batch x sequence length.
            total_steps: length of the run; needed for a share of it.
        """
        if self.unit == "steps":
            return self.amount
        if self.unit == "tokens":
            return self.amount / tokens_per_step
        if total_steps is None:
            raise ValueError(f"want a length in steps or tokens here, got {self}")
        return self.amount * total_steps / 100

    def __str__(self) -> str:
        number = f"{float(self.amount):.12g}"
        if Fraction(number) != self.amount:
            number = _decimal(self.amount)
        return f"{number}%" if self.unit == "%" else f"{number} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A run's sizes: what turns durations into steps."""

    global_batch: int
    """Sequences of one step."""
    sequence_length: int
    total_steps: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all workers."""
        return self.global_batch * self.sequence_length

    def steps(self, duration: Duration) -> Fraction:
        """A duration in optimizer steps, not rounded."""
        return duration.steps(tokens_per_step=self.tokens_per_step, total_steps=self.total_steps)


def _decimal(amount: Fraction) -> str:
    """All digits of a decimal fraction, so that reading it back gives the same amount."""
    with localcontext() as context:
        context.prec = len(str(amount.numerator)) + 4 * len(str(amount.denominator))
        return f"{Decimal(amount.numerator) / Decimal(amount.denominator):f}"
