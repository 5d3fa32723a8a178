"""Files of records, written and read by the tests of them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tokendrop.config.data import DataConfig, SourceConfig
from tokendrop.data.corpus.records import Record, RecordForm, read_records
from tokendrop.data.corpus.sources import list_files

LINES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
TABLES = (".parquet", ".arrow")
SQUEEZE = {".zst": zstandard.compress, ".gz": gzip.compress}


def form(**keys: Any) -> RecordForm:
    source = SourceConfig(name="corpus", corpus=("unused",), only=keys.pop("only", ()), weight=1.0)
    return RecordForm.of(DataConfig(corpus=("unused",), **keys), source)


def read(path: Path, *, after: int = 0, **keys: Any) -> list[Record]:
    (file,) = list_files((str(path),), cache=Path("unused"))
    return list(read_records(file, form(**keys), after=after))


def texts_of(path: Path) -> list[str]:
    records = read(path)
    assert {record.reason for record in records} <= {""}
    return [record.text for record in records]


def write_rows(path: Path, rows: list[dict[str, Any]], *, size: int = 3) -> Path:
    """Rows as lines or as a table, in frames, members, groups or batches of so many."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=size)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table, max_chunksize=size)
    else:
        lines = [json.dumps(row).encode() + b"\n" for row in rows]
        chunks = [b"".join(lines[first : first + size]) for first in range(0, len(lines), size)]
        path.write_bytes(b"".join(map(SQUEEZE.get(path.suffix, bytes), chunks)))
    return path
