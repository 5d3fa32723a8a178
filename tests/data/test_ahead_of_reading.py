"""How far ahead of what is read shards come from their store."""

from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from folders import numbered_rows, write_folder
from tokendrop.data.read import row_reader
from tokendrop.data.read.order import SampleOrder
from tokendrop.data.read.row_reader import MappedSamples, Rows

BLOCK, BLOCKS = 16, 90


class Watched(Rows):
    """Rows of a store, as their reader takes them to be; each block is a shard."""

    is_cached = True
    asked = 0

    def expect(self, firsts) -> None:
        self.asked = len(firsts)


@pytest.mark.parametrize("blocks_a_second", [1e-3, 0.05, 0.2, 1.0, 1e6])
def test_shards_come_as_far_ahead_as_all_workers_read_in_forty_seconds(
    tmp_path: Path, monkeypatch, blocks_a_second: float
) -> None:
    write_folder(tmp_path, numbered_rows(BLOCK * BLOCKS), rows_per_shard=BLOCK, test_share=0.0)
    now = 100.0
    monkeypatch.setattr(row_reader, "_BLOCK", BLOCK)
    monkeypatch.setattr(row_reader, "time", SimpleNamespace(monotonic=lambda: now))
    rows = Watched(tmp_path, "train")
    samples = MappedSamples(rows, SampleOrder(seed=1, weights=[1.0], window=BLOCK), end=BLOCK * BLOCKS)
    samples.at(np.arange(4))
    assert rows.asked == 1 + 2  # nothing is known of the speed
    for block in (1, 2):
        now += 1 / blocks_a_second
        samples.at(np.arange(block * BLOCK, block * BLOCK + 4))
        assert rows.asked == 1 + min(max(2, ceil(40 * blocks_a_second - 1e-6)), 64)
    samples.at(np.arange(4))  # again from the first, as after an epoch of another reader
    assert rows.asked == 1 + 2
