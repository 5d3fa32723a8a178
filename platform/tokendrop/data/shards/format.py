"""Token shards: Arrow IPC files of fixed-size rows, with a manifest.

A folder of shards grows as they are prepared: `manifest.json` says what it holds, `shards.jsonl` gets one line for each
committed shard, and once all are there the manifest says so. A shard counts from its line on.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest as row_checksum

from tokendrop.atomic import atomic_write
from tokendrop.config.data import DataKind, is_name
from tokendrop.errors import DamagedDataError

FORMAT = 5
MANIFEST, SHARDS, TOKENIZER, REJECTED = "manifest.json", "shards.jsonl", "tokenizer.json", "rejected.parquet"
ORIGIN = "origin.json"
"""In a folder of token shards: that it is a copy on this node, whose shards come from a store when they are read."""
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_FOLDER = re.compile("[0-9a-f]{16}")  # the name that preparation gives a folder of token shards
MOST = 2**48
"""Above what is counted here; no corpus comes close."""

DOCUMENTS = pa.list_(
    pa.struct(
        [
            ("start", pa.int64()),  # first token, counted from the row's first; negative: it began in an earlier row
            ("subset", pa.dictionary(pa.int32(), pa.string())),
            ("file", pa.int32()),  # place in the manifest's `files`
            ("record", pa.int64()),  # line of a text file, row of a table, counted from 1
        ]
    )
)
"""The documents that a row is made of, in order."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Rows at hand: how many of each source, and whether there will be more."""

    rows: tuple[int, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetCounts:
    """What a shard or a corpus holds of one subset of documents, such as the Pile's `Wikipedia (en)`."""

    subset: str
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
class ShardFile:
    """One file of rows."""

    source: str
    split: Split
    file: str
    rows: int
    bytes: int
    """Size of the file."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(ShardFile):
    """A file of rows, with what preparation needs to go on after it."""

    subsets: tuple[SubsetCounts, ...]
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
    subsets: tuple[SubsetCounts, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(DataKind):
            raise ValueError(f"kind: want one of {', '.join(get_args(DataKind))}")
        if not 0 < len(set(self.sources)) == len(self.sources) or not all(map(is_name, self.sources)):
            raise ValueError("sources: want different names of letters, digits, '_' and '.'")

    def write(self, folder: Path) -> None:
        """Write manifest.json, whole or not at all; raises OSError."""
        atomic_write(folder / MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())


def shard_name(source: str, split: Split, number: int) -> str:
    """The file of a stream's shard, counted from 0."""
    return f"{source}-{split}-{number:05}.arrow"


@contextmanager
def telling_damage(path: Path) -> Iterator[None]:
    """What goes wrong with a file of prepared data, as DamagedDataError."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None


def open_plain(path: Path) -> BufferedReader:
    """A file to read; ValueError for a pipe, a folder and their like, which might keep a reader waiting for ever."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("not a file")
    return file


def write_shard(
    path: Path, rows_NT: NDArray[np.integer], documents: pa.Array, contents: Sequence[bytes] | None = None
) -> tuple[int, str]:
    """Write rows (N, row_length) of uint16 or uint32 with their documents, whole or not at all; bytes and sha256.

    Args:
        contents: the file of each row's image.
    """
    rows_NT = np.ascontiguousarray(rows_NT)
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(rows_NT.reshape(-1)), rows_NT.shape[1]),
        pa.array([row_checksum(row) for row in rows_NT], pa.uint64()),
        documents,
    ]
    names = ["tokens", "xxh3_64", "documents"]
    if contents is not None:
        columns.append(pa.array(contents, pa.large_binary()))  # the last column, see `files.Contents`
        names.append("contents")
    batch = pa.record_batch(columns, names=names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()
    atomic_write(path, content)
    return content.size, hashlib.sha256(content).hexdigest()


def append_shard(folder: Path, shard: Shard) -> None:
    """Commit a shard whose file is written: its line is on the disk when this returns. Raises OSError."""
    with (folder / SHARDS).open("ab") as file:
        file.write(json.dumps(asdict(shard)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def drop_torn_line(folder: Path) -> None:
    """Remove what a process left of its last line when it died while writing that."""
    path = folder / SHARDS
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def total(counts: Iterable[SubsetCounts]) -> tuple[SubsetCounts, ...]:
    """Counts added up by subset, by name."""
    found: dict[str, list[int]] = {}
    for one in counts:
        sums = found.setdefault(one.subset, [0, 0, 0])
        for number, value in enumerate((one.documents, one.tokens, one.bytes)):
            sums[number] += value
    return tuple(
        SubsetCounts(subset=name, documents=documents, tokens=tokens, bytes=size)
        for name, (documents, tokens, size) in sorted(found.items())
    )


def damaged(path: Path, reason: Exception | str) -> DamagedDataError:
    """The error for a file of prepared data that is not what it was."""
    what = getattr(reason, "strerror", None) or " ".join(str(reason).split())
    return DamagedDataError("; ".join(filter(None, [f"{path}: damaged ({what})", remedy(path.parent)])))


def remedy(folder: Path) -> str:
    """What to do about damage in a folder; nothing where it is not one that preparation made."""
    if (folder / ORIGIN).is_file():
        return f"remove {folder}, and its shards come from their store again"
    is_ours = _FOLDER.fullmatch(folder.name) and ((folder / MANIFEST).is_file() or (folder / SHARDS).is_file())
    return f"remove {folder} and prepare the data again" if is_ours else ""
