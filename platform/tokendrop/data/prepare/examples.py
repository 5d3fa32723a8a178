"""Labelled examples into rows, by a WordPiece."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokendrop.config.task import TaskConfig
from tokendrop.data.read.example_rows import MOST_VALUE, example_row, example_row_length, number_as_label
from tokendrop.data.tokenizer import pair_template, pair_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleForm:
    """How an example, a list of texts, then of choices, then its label, becomes a row."""

    texts: int
    """One or two; where there are choices, each of them ends the last text, or is the second one."""
    labels: tuple[str, ...]
    """In their order; where there are none, the label is a number."""
    choices: bool
    """Whether there is a choice for each label."""
    sequence_length: int

    @classmethod
    def of(cls, task: TaskConfig, sequence_length: int) -> "ExampleForm":
        """That of a task which has columns."""
        columns: Any = task
        return cls(
            texts=len(columns.texts),
            labels=columns.labels,
            choices=bool(columns.choices),
            sequence_length=sequence_length,
        )

    @property
    def row_length(self) -> int:
        """Numbers of a row."""
        return example_row_length(self.sequence_length, choices=len(self.labels) if self.choices else 1)


def example_rows(
    tokenizer: str, examples: Sequence[str], form: ExampleForm
) -> tuple[list[NDArray[np.uint32]], list[str]]:
    """The row of each example, or why it has none.

    Args:
        tokenizer: the text of its tokenizer.json.
        examples: JSON, or an empty text for an example that could not be read.
    """
    encoder = _encoder(tokenizer, form.sequence_length)
    pad = pair_vocabulary(encoder).pad
    rows: list[NDArray[np.uint32]] = []
    reasons: list[str] = []
    for example in examples:
        row, reason = [], ""
        if example:
            try:
                label, inputs = _parsed(json.loads(example), form)
                found = [(one.ids, one.type_ids.count(0)) for one in encoder.encode_batch(inputs)]
                row = example_row(label, found, form.sequence_length, pad)
            except ValueError as error:
                reason = str(error)
        rows.append(np.array(row, np.uint32))
        reasons.append(reason)
    return rows, reasons


def _parsed(values: list[Any], form: ExampleForm) -> tuple[int, list[Any]]:
    """The label, and what each of the example's sequences is made of; ValueError where it is none."""
    *texts, label = values
    for text in texts[: form.texts]:
        if not isinstance(text, str):
            raise ValueError(f"want a text, got {text!r:.80}")
    if not form.choices:
        return _label(label, form), [texts[0] if form.texts == 1 else tuple(texts)]
    choices = texts[form.texts] if isinstance(texts[form.texts], list) else texts[form.texts :]
    if len(choices) != len(form.labels):
        raise ValueError(f"want {len(form.labels)} choices, got {len(choices)}")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            raise ValueError(f"choice {number} is empty")
    before = f"{texts[1]} " if form.texts == 2 else ""
    return _label(label, form), [(texts[0], before + choice) for choice in choices]


def _label(value: Any, form: ExampleForm) -> int:
    text = str(value).strip()
    if form.labels:
        if text not in form.labels:
            raise ValueError(f"want a label of {', '.join(form.labels)}, got {text[:80]!r}")
        return form.labels.index(text)
    try:
        return number_as_label(float(text))
    except (ValueError, OverflowError):
        raise ValueError(f"want a label from 0 to {MOST_VALUE}, got {text[:80]!r}") from None


@cache
def _encoder(tokenizer: str, length: int) -> Tokenizer:
    """Puts special tokens around texts, and cuts the longer one of two until both fit."""
    encoder = pair_template(Tokenizer.from_str(tokenizer))
    encoder.encode_special_tokens = True  # what a text spells out is text
    encoder.enable_truncation(length)
    return encoder
