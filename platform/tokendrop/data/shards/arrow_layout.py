"""Where the buffers of an Arrow file lie, by the format's own specification.

A token shard is looked into this way and not by pyarrow, whose reader takes a file at its word: one changed bit can
make it end the process. Every number here is looked up within the file's bytes; what comes of a wrong one is an error,
or a wrong place, which the checksums of rows tell.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = b"ARROW1"
_RECORD_BATCH = 3  # of the union MessageHeader


class Span(NamedTuple):
    """Bytes of a file."""

    start: int
    length: int


class Layout(NamedTuple):
    """What an Arrow file of one record batch says of it."""

    rows: int
    buffers: tuple[Span, ...]
    """Validity and values of each column and its children, in the order of the schema."""


def read_layout(content: memoryview) -> Layout:
    """The layout of an Arrow IPC file.

    Raises:
        ValueError: it is none, or has not one record batch that is not compressed.
    """
    try:
        return _read(content)
    except (struct.error, OverflowError):
        raise ValueError("it refers to bytes that it does not have") from None


def _read(content: memoryview) -> Layout:
    if content[-len(_MAGIC) :] != _MAGIC:
        raise ValueError("its end is missing")
    end = len(content) - len(_MAGIC) - 4
    footer = _follow(content, end - _number(content, end, "<i"))
    (block,) = _structs(content, _field(content, footer, 3), "<qi4xq", most=1)
    start, metadata_length, _ = block
    message = _follow(content, start + 8)  # after a mark and a length
    if content[_field(content, message, 1)] != _RECORD_BATCH:
        raise ValueError("it has no record batch")
    batch = _follow(content, _field(content, message, 2))
    if _field(content, batch, 3, optional=True):
        raise ValueError("it is compressed")
    body = start + metadata_length
    spans = _structs(content, _field(content, batch, 2), "<qq", most=len(content) // 16)
    buffers = tuple(Span(body + start, length) for start, length in spans)
    if not all(0 <= one.start <= one.start + one.length <= len(content) for one in buffers):
        raise ValueError("it refers to bytes that it does not have")
    return Layout(_number(content, _field(content, batch, 0), "<q"), buffers)


# --- FlatBuffers: tables, their fields, vectors ---


def _number(content: memoryview, at: int, kind: str) -> int:
    if at < 0:
        raise struct.error
    return struct.unpack_from(kind, content, at)[0]


def _follow(content: memoryview, at: int) -> int:
    return at + _number(content, at, "<I")


def _field(content: memoryview, table: int, number: int, *, optional: bool = False) -> int:
    """Where a field of a table lies; 0 where it is left out."""
    fields = table - _number(content, table, "<i")
    place = 4 + 2 * number
    offset = _number(content, fields + place, "<H") if place < _number(content, fields, "<H") else 0
    if not offset and not optional:
        raise ValueError("a field is missing")
    return table + offset if offset else 0


def _structs(content: memoryview, at: int, kind: str, *, most: int) -> Iterator[tuple[int, ...]]:
    vector = _follow(content, at)
    count, size = _number(content, vector, "<I"), struct.calcsize(kind)
    if not 0 < count <= most:
        raise ValueError(f"it has {count} record batches or buffers")
    return struct.iter_unpack(kind, content[vector + 4 : vector + 4 + count * size])
