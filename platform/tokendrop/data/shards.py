"""Token shards: Arrow IPC files of fixed-size rows, with a manifest.

A folder of shards grows as they are prepared: `manifest.json` says what it holds, `shards.jsonl` gets one line for each
committed shard, and once all are there the manifest says so. A shard counts from its line on.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest as row_checksum

from tokendrop.config.load import build
from tokendrop.config.model import DataKind
from tokendrop.data.commit import write_whole
from tokendrop.data.order import Committed
from tokendrop.errors import UserError

FORMAT = 4
MANIFEST, SHARDS, TOKENIZER, REJECTED = "manifest.json", "shards.jsonl", "tokenizer.json", "rejected.parquet"
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_TOKEN_TYPES = (pa.uint16(), pa.uint32())

DOCUMENTS = pa.list_(
    pa.struct(
        [
            ("start", pa.int64()),  # first token, counted from the row's first; negative: it began in an earlier row
            ("set", pa.dictionary(pa.int32(), pa.string())),
            ("file", pa.int32()),  # place in the manifest's `files`
            ("record", pa.int64()),  # line of a text file, row of a table, counted from 1
        ]
    )
)
"""The documents that a row is made of, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCounts:
    """What a shard or a corpus holds of one set of documents, such as the Pile's `Wikipedia (en)`."""

    set: str
    """Empty for documents that name none."""
    documents: int
    """Those that begin here."""
    tokens: int
    """Tokens in rows."""
    bytes: int
    """UTF-8 bytes of the documents that begin here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the next shard of a stream goes on in its source."""

    file: int
    """Place in the manifest's `files`."""
    record: int
    token: int
    """First token of that record which is in no row yet."""
    seen: int
    """Records of the source before that one, rejected ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of rows."""

    source: str
    split: Split
    file: str
    rows: int
    bytes: int
    """Size of the file."""
    sha256: str
    sets: tuple[SetCounts, ...]
    next: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What manifest.json says."""

    format: int
    kind: DataKind
    sequence_length: int
    row_length: int
    """Numbers in a row: its tokens, and what `kind` puts beside them."""
    vocab_size: int
    tokenizer_sha256: str
    sources: tuple[str, ...]
    files: tuple[str, ...]
    is_complete: bool = False
    documents: int = 0
    """Documents read; this and what follows is known once preparation is complete."""
    rejected: int = 0
    tokens: int = 0
    """Tokens in rows."""
    rows: tuple[int, ...] = ()
    """Rows of train, validation and test."""
    sets: tuple[SetCounts, ...] = ()

    def write(self, folder: Path) -> None:
        write_whole(folder / MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A folder of token shards as far as it is committed."""

    header: Header
    shards: tuple[Shard, ...]

    def of(self, source: str, split: Split) -> list[Shard]:
        """The shards of one stream, in order."""
        return [shard for shard in self.shards if (shard.source, shard.split) == (source, split)]

    def committed(self, split: Split) -> Committed:
        """Rows at hand, by source."""
        rows = tuple(sum(shard.rows for shard in self.of(source, split)) for source in self.header.sources)
        return Committed(rows, self.header.is_complete)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        UserError: there is none, it can't be read, or another version of tokendrop wrote it.
    """
    path = folder / MANIFEST
    with _telling_damage(path):
        told = json.loads(path.read_text())
    written = told.get("format", FORMAT) if isinstance(told, dict) else FORMAT
    if written != FORMAT:
        raise UserError(
            f"{folder}: token shards of format {written}, this version reads {FORMAT}; prepare the data again"
        )
    with _telling_damage(path):
        header: Header = build(Header, told, "")
    path = folder / SHARDS
    with _telling_damage(path):
        # read after the header: where that says complete, all lines are there
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a line being written does not count
        shards = tuple(build(Shard, json.loads(line), f"line {number}") for number, line in enumerate(lines, start=1))
    if header.is_complete and header.rows != tuple(
        sum(shard.rows for shard in shards if shard.split == split) for split in SPLITS
    ):
        raise damaged(path, f"its shards do not add up to the rows that {MANIFEST} tells of")
    return Manifest(header=header, shards=shards)


@contextmanager
def _telling_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Look at every file, without reading rows.

    Raises:
        UserError: a shard is missing or cut short, or the tokenizer is another one.
    """
    tokenizer = folder / TOKENIZER
    try:
        if hashlib.sha256(tokenizer.read_bytes()).hexdigest() != manifest.header.tokenizer_sha256:
            raise damaged(tokenizer, "not the tokenizer that made these shards")
        for shard in manifest.shards:
            path = folder / shard.file
            size = path.stat().st_size
            if size != shard.bytes:
                raise damaged(path, f"want {shard.bytes} bytes, found {size}")
    except OSError as error:
        raise damaged(Path(error.filename), error.strerror or "") from None


def write_shard(path: Path, rows_NT: NDArray[np.integer], documents: pa.Array) -> tuple[int, str]:
    """Write rows (N, row_length) of uint16 or uint32 with their documents, whole or not at all; bytes and sha256."""
    rows_NT = np.ascontiguousarray(rows_NT)
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(rows_NT.reshape(-1)), rows_NT.shape[1]),
        pa.array([row_checksum(row) for row in rows_NT], pa.uint64()),
        documents,
    ]
    batch = pa.record_batch(columns, names=["tokens", "xxh3_64", "documents"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()
    write_whole(path, content)
    return content.size, hashlib.sha256(content).hexdigest()


def append_shard(folder: Path, shard: Shard) -> None:
    """Commit a shard whose file is written."""
    with (folder / SHARDS).open("ab") as file:
        file.write(_line(shard))
        file.flush()
        os.fsync(file.fileno())


def rewrite_shards(folder: Path, shards: Iterable[Shard]) -> None:
    """Put the lines of committed shards into this order."""
    write_whole(folder / SHARDS, b"".join(map(_line, shards)))


def drop_torn_line(folder: Path) -> None:
    """Remove what a process left of its last line when it died while writing that."""
    path = folder / SHARDS
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def map_shard(path: Path, shape: tuple[int, int]) -> tuple[NDArray[np.integer], NDArray[np.uint64]]:
    """The mapped rows of a shard, (N, row_length), and their checksums, (N,).

    Raises:
        UserError: it can't be read, or does not have this shape.
    """
    try:
        batch = _batch(path)
        column, checks = batch.column("tokens"), batch.column("xxh3_64")
        if not pa.types.is_fixed_size_list(column.type) or column.type.value_type not in _TOKEN_TYPES:
            raise damaged(path, f"{column.type} instead of rows of tokens")
        rows_NT = column.values.to_numpy(zero_copy_only=True).reshape(batch.num_rows, -1)
        checks_N = checks.to_numpy(zero_copy_only=True)
    except UserError:
        raise
    except (OSError, ValueError, IndexError, KeyError, pa.ArrowException) as error:
        raise damaged(path, error) from None
    if rows_NT.shape != shape or checks_N.dtype != np.uint64:
        raise damaged(path, f"want {shape} rows and tokens as the manifest says, found {rows_NT.shape}")
    return rows_NT, checks_N


def read_documents(path: Path, row: int) -> list[dict[str, int | str]]:
    """The documents of one row, as `DOCUMENTS` has them.

    Raises:
        UserError: the shard can't be read.
    """
    try:
        return _batch(path).column("documents")[row].as_py()
    except (OSError, ValueError, IndexError, KeyError, pa.ArrowException) as error:
        raise damaged(path, error) from None


def total(counts: Iterable[SetCounts]) -> tuple[SetCounts, ...]:
    """Counts added up by set, by name."""
    found: dict[str, list[int]] = {}
    for one in counts:
        sums = found.setdefault(one.set, [0, 0, 0])
        for number, value in enumerate((one.documents, one.tokens, one.bytes)):
            sums[number] += value
    return tuple(
        SetCounts(set=name, documents=documents, tokens=tokens, bytes=size)
        for name, (documents, tokens, size) in sorted(found.items())
    )


def damaged(path: Path, reason: Exception | str) -> UserError:
    """The error for a file of prepared data that is not what it was."""
    reason = " ".join(str(reason).split())
    return UserError(f"{path}: damaged ({reason}); remove {path.parent} and prepare the data again")


def _line(shard: Shard) -> bytes:
    return json.dumps(asdict(shard)).encode() + b"\n"


def _batch(path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    batch.validate()  # a damaged file may point outside of itself
    return batch
