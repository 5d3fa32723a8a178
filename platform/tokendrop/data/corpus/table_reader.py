"""The rows of Parquet and Arrow files."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokendrop.data.corpus.byte_streams import BROKEN, DamageError, SourceBytes, store_read_bytes
from tokendrop.data.corpus.sources import SourceFile
from tokendrop.errors import UserError

# Decoded rows that are held at a time, where a Parquet file leaves the choice.
_BATCH_BYTES, _BATCH_ROWS = 2**20, 256

# Rows that are looked at together: a damaged batch may tell of any number of them.
_SLICE_ROWS = 2**16

_ARROW_FILE, _ARROW_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


def read_rows(
    file: SourceFile, columns: Sequence[str], subset_key: str, after: int
) -> Iterator[tuple[int, list[Any], Any]]:
    """Rows numbered over `after` with the values of columns, and that of the subset's.

    Where one column is asked for, it is text: of what is none, there is `None`, its type, or bytes.

    Raises:
        DamageError: nothing more can be read.
        UserError: the table has no such column.
    """
    is_parquet = file.name.endswith(".parquet")
    batches = _parquet(file, columns, subset_key, after) if is_parquet else _arrow(file, columns)
    values_of = _values if len(columns) == 1 else _any_values
    rows = number = 0  # before the batch, and of the last row that was given
    try:
        for batch in batches:
            if isinstance(batch, int):
                rows += batch
                continue
            batch.validate()
            for first in range(max(rows, after), rows + batch.num_rows, _SLICE_ROWS):
                part = batch.slice(first - rows, _SLICE_ROWS)
                subsets = _column(part, subset_key)
                names = iter(()) if subsets is None else _values(subsets)
                values = zip(*(values_of(_column(part, column)) for column in columns), strict=True)
                for number, row in enumerate(values, start=first + 1):
                    yield number, [*row], next(names, None)
            rows += batch.num_rows
    except UserError:
        raise
    except BROKEN as error:
        raise DamageError(max(rows, number) + 1, error) from None


def _parquet(file: SourceFile, columns: Sequence[str], subset_key: str, after: int) -> Iterator[pa.RecordBatch | int]:
    """Batches of rows, or how many of them are skipped."""
    with SourceBytes(file, seekable=True) as raw:
        table = pq.ParquetFile(raw, buffer_size=store_read_bytes(file))
        _check_columns(file, table.schema_arrow, columns)
        rows = 0
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            rows += group.num_rows
            if rows <= after:
                yield group.num_rows
                continue
            size = min(_BATCH_ROWS, _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
            yield from table.iter_batches(max(1, size), [number], columns=[*columns, subset_key], use_threads=False)


def _arrow(file: SourceFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Batches of a stream, or of a file, which is a stream between two marks."""
    with SourceBytes(file, seekable=True) as raw:
        stream = io.BufferedReader(raw, store_read_bytes(file))
        is_file = stream.read(8).startswith(_ARROW_FILE)
        stream.seek(8 if is_file else 0)
        reader = pa.ipc.open_stream(stream)
        _check_columns(file, reader.schema, columns)
        yield from reader
        stream.seek(max(0, file.size - 8))
        if not stream.read().endswith(_ARROW_FILE if is_file else _ARROW_END):
            raise pa.ArrowInvalid("its end is missing")


def _check_columns(file: SourceFile, schema: pa.Schema, columns: Sequence[str]) -> None:
    empty = schema.empty_table()
    check_columns(file, [*schema.names, *(one for one in columns if _column(empty, one) is not None)], columns)


def check_columns(file: SourceFile, names: Sequence[str], columns: Sequence[str]) -> None:
    """Raises UserError where a table has not all columns that are wanted."""
    key = "data.text_key" if len(columns) == 1 else "of task"
    for column in columns:
        if column not in names:
            raise UserError(f"{file.name}: no column '{column}' ({key}), it has {', '.join(names)[:200]}")


def _column(table: pa.Table | pa.RecordBatch, key: str) -> Any:
    """The column of that name, or the field of its structs; None where there is no such."""
    names = table.schema.names
    if key in names:
        return table.column(names.index(key))
    first, *parts = key.split(".")
    column: Any = table.column(names.index(first)) if first in names else None
    for part in parts:
        if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return None
        column = column.flatten()[column.type.get_field_index(part)]  # where a struct is null, so are its fields
    return column


def _values(column: pa.Array) -> Iterator[Any]:
    """Text, None for null, the type of what is no text, b"" for what can't be taken out.

    Nothing is taken out of a column before it was checked in full: pyarrow may look outside of it, and die.
    """
    kind = column.type
    is_whole = _is_valid(column)
    if pa.types.is_dictionary(kind) and not is_whole:
        texts = list(_values(column.dictionary))
        for place in column.indices.to_pylist():
            yield None if place is None else texts[place] if 0 <= place < len(texts) else b""
        return
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        yield from (kind if is_valid else None for is_valid in column.is_valid().to_pylist())
    elif is_whole:
        for value in column:
            yield value.as_py()
    else:
        for row in range(len(column)):
            one = column.slice(row, 1)
            yield one[0].as_py() if _is_valid(one) else b""


def _any_values(column: pa.Array) -> Iterator[Any]:
    """Values of any type, as Python has them; b"" for what can't be taken out."""
    yield from column.to_pylist() if _is_valid(column) else [b""] * len(column)


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowException:
        return False
    return True
