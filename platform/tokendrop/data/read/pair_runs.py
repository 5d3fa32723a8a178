"""The rows of pairs of sentences as they lie in token shards.

A model that reads S tokens has room for R = S - 3 beside [CLS] and two [SEP]. The numbers of a row are how many tokens
it has, the tokens and their padding (R), and numbers with 16 flags each: whether a sentence begins at a token. Where A
ends and B begins is chosen when a row is read, so it can be elsewhere in each epoch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FLAGS = 16


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows as they are read."""

    tokens_BR: NDArray[np.int64]
    lengths_B: NDArray[np.int64]
    begins_BR: NDArray[np.bool_]
    """Whether a sentence begins here: at the first token, and at one more at least."""


def pair_row_length(sequence_length: int) -> int:
    """Numbers in a row."""
    room = sequence_length - 3
    return 1 + room + -(-room // FLAGS)


def read_runs(rows_BT: NDArray[np.int64], *, sequence_length: int) -> Runs:
    """The runs of sentences in rows, (B, pair_row_length)."""
    room = sequence_length - 3
    flags = rows_BT[:, 1 + room :, None] >> np.arange(FLAGS) & 1
    begins_BR = flags.reshape(len(flags), flags.shape[1] * FLAGS)[:, :room].astype(bool)
    return Runs(rows_BT[:, 1 : 1 + room], rows_BT[:, 0], begins_BR)
