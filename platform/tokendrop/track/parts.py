"""Parquet datasets that grow by parts: folders in which each part tells of some steps, as its name says."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokendrop.atomic import atomic_write
from tokendrop.errors import DamagedDataError

OF_VALIDATION = ("val_loss", "val_figures")
"""Columns that are null at steps without validation."""
_NAME = re.compile(r"(\d+)-(\d+)-rank\d+\.parquet")
_NO_KEYS: Any = None  # a folder named key=value above the run is no column
_ROW_GROUP = 1024  # steps; who reads a few of them reads no more than such a group


def write_part(dataset: Path, table: pa.Table, *, start: int, end: int, rank: int, rows_of_step: int = 1) -> None:
    """Add a part of the steps start < step <= end, whole or not at all.

    Args:
        rank: that writes it.
        rows_of_step: in the table, whose rows are in the order of steps.
    """
    dataset.mkdir(exist_ok=True)
    path = dataset / f"{start:09}-{end:09}-rank{rank}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=_ROW_GROUP * rows_of_step, write_page_checksum=True)
    atomic_write(path, sink.getvalue())  # on the disk, before a checkpoint relies on it


def span_of(part: Path) -> tuple[int, int] | None:
    """The steps start < step <= end that a part tells of, by its name; None for a file with another name."""
    name = _NAME.fullmatch(part.name)
    return (int(name[1]), int(name[2])) if name and int(name[1]) < int(name[2]) else None


def read_part(part: Path, schema: pa.Schema, bounds: Sequence[tuple[str, str, int]] = ()) -> pa.Table:
    """The rows of a part within bounds, such as ("step", ">", 3).

    Raises:
        DamagedDataError: it can't be read, or lacks values.
    """
    try:
        table = pq.read_table(
            part, schema=schema, filters=list(bounds) or None, partitioning=_NO_KEYS, page_checksum_verification=True
        )
        if any(table.column(name).null_count for name in schema.names if name not in OF_VALIDATION):
            raise ValueError("a value is missing")
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        what = part.parent.name.removesuffix(".parquet")
        raise DamagedDataError(f"{part}: this part of the {what} is damaged ({reason})") from None
    return table


def read_all(dataset: Path, schema: pa.Schema) -> pa.Table:
    """All parts of a dataset; files with other names are told of, and left out."""
    tables = [schema.empty_table()]
    for part in sorted(dataset.glob("[!.]*")):
        if span_of(part):
            tables.append(read_part(part, schema))
        else:
            print(f"note     {part}: left out, for it is not named as a part of a run's record", file=sys.stderr)
    return pa.concat_tables(tables)
