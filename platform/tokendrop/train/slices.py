"""Tensors that a checkpoint holds as slices of as many rows each: described once, with four numbers for each slice."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

_COLUMNS = ("file", "offset", "length", "crc32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part of a tensor lies, and the CRC-32 of its bytes."""

    file: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices(Sequence[ChunkStorageMetadata]):
    """A tensor cut along its first dimension, as FSDP does; the last slice may be shorter.

    It stands for torch's list of parts. Each of them is made when it is asked for: very many workers have very many,
    of which a worker reads few.
    """

    shape: torch.Size
    rows: int
    """Of each slice but the last."""
    names: tuple[str, ...]
    """Of files."""
    file: "array[int]"
    """Of each slice, by its place in `names`."""
    offset: "array[int]"
    length: "array[int]"
    crc32: "array[int]"

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        at, rest = number * self.rows, self.shape[1:]
        shape = torch.Size((min(self.rows, self.shape[0] - at), *rest))
        return ChunkStorageMetadata(torch.Size((at, *[0] * len(rest))), shape)

    def at(self, begin: Sequence[int]) -> ChunkStorageMetadata:
        """The slice that begins at these indices of the tensor."""
        return self[begin[0] // self.rows]

    def place(self, begin: Sequence[int]) -> Place:
        """Where that slice lies."""
        number = begin[0] // self.rows
        return Place(
            file=self.names[self.file[number]],
            offset=self.offset[number],
            length=self.length[number],
            crc32=self.crc32[number],
        )

    def of(self, tensor: Any) -> list[ChunkStorageMetadata]:
        """Those that hold something of what this worker has of a tensor."""
        if not isinstance(tensor, DTensor):
            return list(self)
        held = [(piece.offsets[0], piece.offsets[0] + piece.sizes[0]) for piece in tensor.__create_chunk_list__()]
        ranges = [range(start // self.rows, -(-stop // self.rows)) for start, stop in held if start < stop]
        return [self[number] for number in sorted(set().union(*ranges))]


def rows_of_slices(tensor: TensorStorageMetadata) -> int | None:
    """Rows of each slice, where a tensor's parts are slices of as many each; else None."""
    parts = sorted(tensor.chunks, key=lambda part: part.offsets)
    if len(parts) < 2 or not tensor.size:
        return None
    (total, *rest), rows = tensor.size, parts[0].sizes[0]
    starts = range(0, total, rows) if rows else range(0)
    if len(parts) != len(starts):
        return None
    for start, part in zip(starts, parts, strict=True):
        (at, *zeros), (size, *others) = part.offsets, part.sizes
        if at != start or size != min(rows, total - start) or others != rest or any(zeros):
            return None
    return rows


def described(rows: int, *columns: Sequence[int]) -> dict[str, Any]:
    """Slices as JSON.

    Args:
        columns: of all slices, in their order: the number of the file, and the offset, length and CRC-32 in it.
    """
    return {"rows": rows, **dict(zip(_COLUMNS, map(list, columns), strict=True))}


def as_slices(shape: torch.Size, found: Mapping[str, Any], files: Mapping[str, int]) -> Slices:
    """Slices from what `described` gave.

    Args:
        files: bytes of each file, by name, in the order of their numbers.
    Raises:
        ValueError: they are not all of the tensor, or not in these files; or what Python does, where they are none.
    """
    columns = {key: array("Q", found[key]) for key in _COLUMNS}
    rows, sizes = int(found["rows"]), tuple(files.values())
    if not shape or min(shape) < 0:
        raise ValueError(f"a tensor of shape {tuple(shape)} has no slices")
    if rows < 1 or len({-(-shape[0] // rows), *map(len, columns.values())}) != 1:
        raise ValueError("the slices are not all of the tensor")
    if max(columns["file"]) >= len(sizes):
        raise ValueError("a slice is in none of them")
    ends = map(add, columns["offset"], columns["length"])
    if any(end > sizes[number] for number, end in zip(columns["file"], ends, strict=True)):
        raise ValueError("a slice ends behind its file")
    return Slices(shape=shape, rows=rows, names=tuple(files), **columns)
