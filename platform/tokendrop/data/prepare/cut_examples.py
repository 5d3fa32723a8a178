"""What there is to say of labelled examples that are as long as a sequence can be: longer ones were cut to it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokendrop.data.read.example_rows import read_examples
from tokendrop.data.read.order import first_ids
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.format import SPLITS
from tokendrop.data.shards.manifest import read_header

_BLOCK = 4096  # rows read at a time


def note_of_cut(folder: Path) -> str | None:
    """How many examples fill their sequence, in one sentence; None where none does, or where rows are no examples.

    Rows do not tell an example that was cut from one that just fits; few do.
    """
    header = read_header(folder)
    if header.kind != "examples":
        return None
    full = 0
    for rows_BT in _blocks(folder):
        mask_BCS = read_examples(rows_BT, header.sequence_length).attention_mask_BCS
        full += int(mask_BCS[:, :, -1].any(axis=1).sum())
    if not full:
        return None
    return (
        f"data.corpus: {full:,} of {sum(header.rows):,} examples fill model.sequence_length={header.sequence_length}"
        " tokens, and what was longer is cut; want a longer one to keep them whole"
    )


def _blocks(folder: Path) -> Iterator[NDArray[np.int64]]:
    for split in SPLITS:
        rows = Rows(folder, split)
        for source, count in enumerate(rows.committed.rows):
            ids = first_ids(source, count)
            for first in range(0, count, _BLOCK):
                yield rows.read(ids[first : first + _BLOCK])
