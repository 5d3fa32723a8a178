"""Slices in columns say what a list of their parts says, and are refused where they say anything else."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tokendrop.train.slices import Place, as_slices, described, rows_of_slices

FILES = {f"__{rank}_0.distcp": 10**6 for rank in range(16)}
NUMBERS = {name: number for number, name in enumerate(FILES)}


@st.composite
def cut_tensors(draw: st.DrawFn) -> TensorStorageMetadata:
    """As FSDP cuts them: as many rows to each worker as there are, and less to the last one that has some."""
    shape = torch.Size(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    rows = -(-shape[0] // draw(st.integers(1, 16)))
    parts = [
        ChunkStorageMetadata(
            torch.Size((at, *[0] * (len(shape) - 1))), torch.Size((min(rows, shape[0] - at), *shape[1:]))
        )
        for at in range(0, shape[0], rows)
    ]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), shape, draw(st.permutations(parts)))


def places(count: int) -> list[Place]:
    names = list(FILES)
    return [Place(file=names[(7 * n) % 16], offset=100 * n, length=n + 1, crc32=2**32 - 1 - n) for n in range(count)]


def columns(where: list[Place]) -> list[list[int]]:
    return [
        [NUMBERS[one.file] for one in where],
        *([getattr(one, k) for one in where] for k in ("offset", "length", "crc32")),
    ]


@given(cut_tensors())
def test_slices_are_the_parts_that_they_stand_for_where_these_are_alike(tensor: TensorStorageMetadata) -> None:
    rows, where = rows_of_slices(tensor), places(len(tensor.chunks))
    if len(tensor.chunks) == 1:
        assert rows is None
        return
    assert rows is not None
    slices = as_slices(tensor.size, described(rows, *columns(where)), FILES)
    parts = sorted(tensor.chunks, key=lambda part: part.offsets)
    assert list(slices) == parts
    for part, place in zip(parts, where, strict=True):
        assert slices.at(part.offsets) == part
        assert slices.place(part.offsets) == place
    assert slices.of(torch.empty(tensor.size)) == parts


@given(cut_tensors(), st.data())
def test_parts_that_are_not_all_alike_are_not_taken_for_slices(
    tensor: TensorStorageMetadata, data: st.DataObject
) -> None:
    parts = sorted(tensor.chunks, key=lambda part: part.offsets)
    number = data.draw(st.integers(0, len(parts) - 1))
    sizes, offsets = list(parts[number].sizes), list(parts[number].offsets)
    dimension = data.draw(st.integers(0, len(sizes) - 1))
    changed = data.draw(st.sampled_from([sizes, offsets]))
    changed[dimension] += 1
    parts[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    tensor.chunks = parts
    assert rows_of_slices(tensor) is None


@pytest.mark.parametrize("shape", [(), (-10, 2), (10, -2)])
def test_what_has_no_rows_has_no_slices(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has no slices"):
        as_slices(torch.Size(shape), change(), FILES)


def change(**changed: Any) -> dict[str, Any]:
    return described(4, *columns(places(3))) | changed


@pytest.mark.parametrize(
    "found",
    [
        change(rows=0),
        change(rows=-4),
        change(rows=3),
        change(rows="x"),
        change(file=[0, 1]),
        change(file=[0, 1, 16]),
        change(file=[0, 1, -1]),
        change(offset=[0, 1, -1]),
        change(offset=[0, 1, 10**6]),
        change(length=[1, 1, 10**30]),
        change(length=[1, 1, 1.5]),
        change(crc32=["x", 1, 1]),
        change(crc32=None),
        {"rows": 4},
    ],
)
def test_columns_that_lead_elsewhere_or_to_nothing_are_refused(found: dict[str, Any]) -> None:
    as_slices(torch.Size((10, 2)), change(), FILES)
    with pytest.raises((ValueError, TypeError, KeyError, OverflowError)):
        as_slices(torch.Size((10, 2)), found, FILES)
