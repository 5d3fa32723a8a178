"""A look into a folder of token shards: one sample, what there is of each subset."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from tokendrop.data.read.example_rows import read_examples
from tokendrop.data.read.order import ROW_BITS, rows_of
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.files import check_files, read_documents
from tokendrop.data.shards.format import (
    REJECTED,
    SPLITS,
    TOKENIZER,
    Split,
    SubsetCounts,
    damaged,
)
from tokendrop.data.shards.manifest import read_counts, sum_by_subset
from tokendrop.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a row has of a document."""

    start: int
    """Its first token, counted from the row's first; negative where it began in an earlier row."""
    subset: str
    file: str
    record: int
    """Line of a text file, row of a table, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row of tokens, and where it is from."""

    sample: int
    split: Split
    source: str
    epoch: int
    """Of its source, counted from 0."""
    row: int
    """Of its source and split."""
    shard: str
    row_in_shard: int
    begins_inside: bool
    """Whether the document that the row begins with began in an earlier row."""
    documents: tuple[Part, ...]
    text: str
    tokens: tuple[int, ...]


def find_sample(folder: Path, sample: int, split: Split) -> Sample:
    """The sample with this id, of any source and epoch.

    Raises:
        UserError: there is none, or its row or the tokenizer is damaged.
    """
    if not 0 <= sample < 2**63:
        raise UserError(f"--sample: want a sample id from 0 to 2^63 - 1, got {sample}")
    rows = Rows(folder, split)
    check_files(folder, rows.manifest)
    header, ids = rows.manifest.header, np.array([sample])
    source, row = (int(found[0]) for found in rows_of(ids, sources=len(header.sources)))
    if row >= (have := rows.committed.rows[source]):
        whose = f"row {row} of '{header.sources[source]}'"
        raise UserError(f"--sample {sample}: that is {whose}, and {folder} has {have} {split} rows of it")
    (first,), (inside,) = rows.places(ids)
    shard = rows.shard_at(first)
    tokens = rows.read(ids)[0].tolist()
    if header.kind == "sentence_pairs":  # see pair_rows.py
        tokens = tokens[1 : 1 + tokens[0]]
    elif header.kind == "examples":
        found = read_examples(np.array([tokens]), header.sequence_length)
        tokens = found.input_ids_BCS[found.attention_mask_BCS].tolist()
    elif header.kind == "images":
        tokens = [tokens[1]]  # whose text is its class
    (found_here,) = read_documents(folder, shard, [inside])
    documents = tuple(_part(one, header.files) for one in found_here)
    return Sample(
        sample=sample,
        split=split,
        source=header.sources[source],
        epoch=(sample >> ROW_BITS) // len(header.sources),
        row=row,
        shard=shard.file,
        row_in_shard=inside,
        begins_inside=bool(documents) and documents[0].start < 0,
        documents=documents,
        text=Tokenizer.from_file(str(folder / TOKENIZER)).decode(tokens, skip_special_tokens=False),
        tokens=tuple(tokens),
    )


def _part(document: dict[str, int | str], files: tuple[str, ...]) -> Part:
    start, file, record = (int(document[key]) for key in ("start", "file", "record"))
    return Part(start=start, subset=str(document["subset"]), file=files[file], record=record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a table of what there is."""

    name: str
    """Of a subset or a source; empty for documents that name no subset."""
    documents: int
    """Those that begin in a row."""
    tokens: int
    share: float
    """Of all tokens."""
    bytes: int
    tokens_per_byte: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a folder of token shards holds by now."""

    folder: str
    is_complete: bool
    subsets: tuple[Line, ...]
    sources: tuple[Line, ...]
    total: Line
    rejected: int
    rows: dict[Split, int]


def count_tokens(folder: Path) -> Stats:
    """Count what is committed, by the manifest.

    Raises:
        UserError: the manifest can't be read.
    """
    manifest = read_counts(folder)
    header, table = manifest.header, manifest.table
    subsets = sum_by_subset(table)
    sources = [_sum(name, sum_by_subset(table.filter(pc.field("source") == name))) for name in header.sources]
    everything = _sum("total", subsets)
    return Stats(
        folder=str(folder),
        is_complete=header.is_complete,
        subsets=tuple(_line(one, everything.tokens) for one in subsets),
        sources=tuple(_line(one, everything.tokens) for one in sources),
        total=_line(everything, everything.tokens),
        rejected=header.rejected if header.is_complete else _rejected(folder / REJECTED),
        rows={split: sum(manifest.committed(split).rows) for split in SPLITS},
    )


def _sum(name: str, counts: Iterable[SubsetCounts]) -> SubsetCounts:
    sums = np.array([(one.documents, one.tokens, one.bytes) for one in counts], np.int64).reshape(-1, 3).sum(0)
    documents, tokens, size = sums.tolist()
    return SubsetCounts(subset=name, documents=documents, tokens=tokens, bytes=size)


def _line(counts: SubsetCounts, tokens: int) -> Line:
    return Line(
        name=counts.subset,
        documents=counts.documents,
        tokens=counts.tokens,
        share=counts.tokens / max(1, tokens),
        bytes=counts.bytes,
        tokens_per_byte=counts.tokens / counts.bytes if counts.bytes else None,
    )


def _rejected(path: Path) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except FileNotFoundError:
        return 0
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, error) from None
