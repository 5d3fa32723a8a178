"""Rows of labelled examples: a label, and for each choice of the example one sequence of tokens.

A row is `label, first, length, tokens ..., first, length, tokens ...`, where a sequence has `length` tokens without its
padding, of which `first` are [CLS] A [SEP] and the others, where there are any, B [SEP].
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Dimensions: B examples, C choices of each, S tokens of a sequence, T numbers of a row.

MOST_VALUE, _PARTS = 60, 1000
"""Labels that are numbers lie between 0 and this one, kept to thousandths."""


class Examples(NamedTuple):
    """What rows hold."""

    input_ids_BCS: NDArray[np.int64]
    token_types_BCS: NDArray[np.int64]
    attention_mask_BCS: NDArray[np.bool_]
    labels_B: NDArray[np.int64]


def example_row_length(sequence_length: int, *, choices: int) -> int:
    """Numbers of a row."""
    return 1 + choices * (2 + sequence_length)


def example_row(label: int, sequences: Sequence[tuple[Sequence[int], int]], length: int, pad: int) -> list[int]:
    """The row of an example.

    Args:
        sequences: tokens of each choice, and how many of them are [CLS] A [SEP].
        length: tokens of a row's sequence.
    """
    row = [label]
    for tokens, first in sequences:
        row += [first, len(tokens), *tokens, *[pad] * (length - len(tokens))]
    return row


def read_examples(rows_BT: NDArray[np.int64], sequence_length: int) -> Examples:
    """What rows hold."""
    parts_BCT = rows_BT[:, 1:].reshape(len(rows_BT), -1, 2 + sequence_length)
    first_BC1, length_BC1 = parts_BCT[:, :, :1], parts_BCT[:, :, 1:2]
    places_S = np.arange(sequence_length)
    mask_BCS = places_S < length_BC1
    types_BCS = (mask_BCS & (places_S >= first_BC1)).astype(np.int64)
    return Examples(parts_BCT[:, :, 2:], types_BCS, mask_BCS, rows_BT[:, 0])


def number_as_label(value: float) -> int:
    """A label that is a number, as rows have it; OverflowError where it is none from 0 to `MOST_VALUE`."""
    if not 0 <= value <= MOST_VALUE:
        raise OverflowError
    return round(value * _PARTS)


def label_as_number(labels_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """The numbers behind such labels."""
    return labels_B / _PARTS
