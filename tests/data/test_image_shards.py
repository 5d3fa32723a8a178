"""Images are read of shards as their rows are: as they come, in any order, whatever the size of a shard."""

import json
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from images import MODEL, TASK, image_of, write_images
from tiny import experiment
from tokendrop.data.prepare import pack
from tokendrop.data.prepare.pack import Documents, Packer
from tokendrop.data.shards.format import MANIFEST, SHARDS

WINDOW = 10


def test_images_that_are_prepared_later_are_read_as_those_before(tmp_path: Path) -> None:
    write_images(tmp_path, 40)
    lines = (tmp_path / SHARDS).read_text().splitlines(keepends=True)
    header = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(header | {"is_complete": False, "rows": []}))
    (tmp_path / SHARDS).write_text("".join(lines[:2]))  # of each split the first
    step = {"train__global_batch": WINDOW, "train__micro_batch": 1}
    keys = {"data__shuffle_rows": WINDOW, "evaluate__sequences": 4, "drop": {"method": "none"}, **step}
    config = experiment(model=MODEL, task={**TASK, "augment": "none", "crop": "none"}, **keys)
    opened = config.task.build(config).open(tmp_path)
    held_out = opened.batch(*opened.held_out(), 0)
    assert held_out.labels_B.tolist() == [0, 1, 2, 0]
    seen: list[int] = []
    for first in range(0, 40, WINDOW):
        if first == WINDOW:
            (tmp_path / SHARDS).write_text("".join(lines))
        ids, rows = opened.samples.at(np.arange(first, first + WINDOW))
        batch = opened.batch(ids, rows, 0)
        assert batch.labels_B.tolist() == [int(one) % 3 for one in ids]
        assert torch.equal(batch.pixels_BCYX, plain(ids))
        seen += ids.tolist()
    assert sorted(seen) == list(range(40))


def plain(ids: np.ndarray) -> torch.Tensor:
    """The images of those numbers, neither cut nor changed."""
    pixels = np.stack([np.asarray(image_of(int(one))) for one in ids])
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40), rows=st.integers(1, 8), blocks=st.integers(1, 7))
def test_a_shard_has_so_many_images_or_so_many_bytes_of_them_whatever_the_blocks(sizes, rows, blocks):
    before, pack._MOST_CONTENTS = pack._MOST_CONTENTS, 20
    try:
        shards = packed(sizes, rows, blocks)
        assert shards == packed(sizes, rows, len(sizes))
    finally:
        pack._MOST_CONTENTS = before
    assert [one for shard in shards for one in shard] == sizes
    assert all(len(shard) == rows or sum(shard) >= 20 for shard in shards[:-1])
    assert all(sum(shard[:-1]) < 20 for shard in shards)


def packed(sizes: list[int], rows: int, block: int) -> list[list[int]]:
    """The sizes of the images of each shard."""
    packer, shards = Packer(2), list[list[int]]()
    for first in range(0, len(sizes), block):
        packer.add(images_of(sizes[first : first + block], first))
        while ready := packer.shard_ready(rows):
            shards.append([len(one) for one in packer.take(ready).contents or []])
    if left := packer.rows_ready():
        shards.append([len(one) for one in packer.take(left).contents or []])
    return shards


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=20), data=st.data())
def test_preparation_that_goes_on_keeps_each_image_with_its_row(sizes, data):
    done = data.draw(st.integers(1, len(sizes) - 1))
    block = data.draw(st.integers(1, len(sizes)))
    first = Packer(2)
    first.add(images_of(sizes, 0))
    packer = Packer(2, begin=first.take(done).next)
    for start in range(0, len(sizes), block):
        packer.add(images_of(sizes[start : start + block], start))
    found = packer.take(packer.rows_ready())
    assert found.rows_NT[:, 0].tolist() == [*range(done, len(sizes))]
    assert [len(one) for one in found.contents or []] == sizes[done:]


def images_of(sizes: list[int], first: int) -> Documents:
    """Images of so many bytes; their rows begin with their numbers."""
    numbers = first + np.arange(len(sizes))
    return Documents(
        tokens_N=np.stack([numbers, numbers * 0], axis=1).reshape(-1).astype(np.uint32),
        lengths_D=np.full(len(sizes), 2),
        subsets_D=[""] * len(sizes),
        files_D=np.zeros(len(sizes), np.int64),
        records_D=1 + numbers,
        seen_D=numbers,
        bytes_D=np.array(sizes),
        contents_D=[bytes(size) for size in sizes],
    )
