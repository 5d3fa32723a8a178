"""Tokenized documents into a folder of token shards, from where an earlier attempt stopped."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokendrop.atomic import atomic_write, remove_partial
from tokendrop.config.data import DataConfig
from tokendrop.data.corpus.byte_streams import DAMAGED
from tokendrop.data.prepare.pack import Documents, Packer
from tokendrop.data.prepare.pair_rows import PairPacker
from tokendrop.data.shards.format import (
    REJECTED,
    SHARDS,
    SPLITS,
    Header,
    Place,
    Shard,
    Split,
    SubsetCounts,
    append_shard,
    damaged,
    drop_torn_line,
    shard_name,
    total,
    write_shard,
)
from tokendrop.data.shards.manifest import Manifest, order_lines, read_counts, sum_by_subset
from tokendrop.errors import UserError

# Shares of a corpus of fewer documents say little; it is judged when all are read.
_JUDGED_FROM = 100_000

_REJECTED_SCHEMA = pa.schema(
    # `number` is the file's place in the manifest, for a corpus may name a file twice
    [("file", pa.string()), ("line", pa.int64()), ("reason", pa.string()), ("number", pa.int32())]
)


_Part = tuple[str, str]
"""Files of one source and, where all their documents are of the same, of one split."""


class ShardWriter:
    """Packs documents into rows and rows into shards, each committed as soon as it is full.

    What a shard holds is a function of the corpus, so an attempt that goes on writes what the first would have.
    """

    def __init__(
        self, folder: Path, data: DataConfig, *, file_sources: Sequence[str], file_splits: Sequence[str] | None = None
    ) -> None:
        """
        Args:
            folder: with a header; shards that are committed there stay.
            file_sources: the source of each of the header's files.
            file_splits: that of each file's documents; empty where each goes its own way, as without them.
        """
        remove_partial(folder)
        drop_torn_line(folder)
        self.folder, self.max_rejected = folder, data.max_rejected
        splits = file_splits or [""] * len(file_sources)
        self._parts: list[_Part] = list(zip(file_sources, splits, strict=True))
        manifest = read_counts(folder)
        self.header: Header = manifest.header
        self._subsets: tuple[SubsetCounts, ...] = sum_by_subset(manifest.table)
        held_out = max(1, data.rows_per_shard // 16)
        self._rows: dict[Split, int] = {"train": data.rows_per_shard, "validation": held_out}
        if data.test_share or data.test_corpus:
            self._rows["test"] = held_out
        self._streams: dict[tuple[str, Split], _Stream] = {
            (source, split): _Stream(manifest.stream(source, split), self.header, data)
            for source in self.header.sources
            for split in self._rows
        }
        self._restart = {part: min(self._places(part), key=_order) for part in dict.fromkeys(self._parts)}
        self.seen = {part: place.seen for part, place in self._restart.items()}
        self._rejected = self._earlier_rejected()
        self._lost = _damaged_files(self._rejected)
        self._written_rejected = len(self._rejected)

    @property
    def tokens(self) -> int:
        """Tokens in committed rows."""
        return sum(one.tokens for one in self._subsets)

    @property
    def documents(self) -> int:
        """Records read, rejected ones included."""
        return sum(self.seen.values())

    def todo(self) -> Iterator[tuple[int, int]]:
        """Files that are still to be read, and the records of each to leave out."""
        for file, part in enumerate(self._parts):
            place = self._restart[part]
            if file >= place.file:
                yield file, place.record - 1 if file == place.file else 0

    def add(self, block: pa.Table) -> None:
        """Take in records of one file, in order: tokens, split, bytes, subset, file, record, reason.

        Raises:
            UserError: more are rejected than may be, or a file is damaged.
        """
        file = block.column("file")[0].as_py()
        part = self._parts[file]
        reasons = block.column("reason").to_pylist()
        records = block.column("record").to_numpy()
        rejected = [(file, int(records[n]), reason) for n, reason in enumerate(reasons) if reason]
        self._rejected += rejected
        self._lost += _damaged_files(rejected)
        splits = block.column("split").to_numpy()
        seen = self.seen[part] + np.arange(block.num_rows)
        self.seen[part] += block.num_rows
        accepted = np.array([not reason for reason in reasons], bool)
        for split in reversed(self._rows):  # training waits for held-out rows
            here = np.flatnonzero(accepted & (splits == SPLITS.index(split)))
            if len(here):
                self._streams[part[0], split].packer.add(_documents(block, here, seen))
                self._write_full(part[0], split)
        self._judge(is_due=self.documents >= _JUDGED_FROM)

    def finish(self) -> Manifest:
        """Write the rows that are left, and say in the manifest that it is complete.

        Raises:
            UserError: more are rejected than may be, or a file is damaged.
        """
        self._judge(is_due=True)
        for (source, split), stream in self._streams.items():
            if rows := stream.packer.rows_ready():
                self._write(source, split, rows)
        self._write_rejected()
        manifest = order_lines(self.folder)  # the order in which they came depended on blocks
        header: Header = replace(
            self.header,
            is_complete=True,
            documents=self.documents,
            rejected=len(self._rejected),
            tokens=self.tokens,
            rows=tuple(sum(manifest.committed(split).rows) for split in SPLITS),
            subsets=self._subsets,
        )
        header.write(self.folder)
        return replace(manifest, header=header)

    def _places(self, part: _Part) -> list[Place]:
        """Where the splits that this part's files feed go on."""
        source, own = part
        files = [number for number, one in enumerate(self._parts) if one == part]
        start = Place(file=files[0], record=1, token=0, seen=0)
        fed: set[str] = {own} if own else {*self._rows} - {split for _, split in self._parts}
        places = [self._streams[source, split].begin or start for split in self._rows if split in fed]
        if any(place.file not in files for place in places):
            raise damaged(self.folder / SHARDS, f"a shard of '{source}' is to go on in the file of another source")
        return places

    def _write_full(self, source: str, split: Split) -> None:
        packer = self._streams[source, split].packer
        while rows := packer.shard_ready(self._rows[split]):
            self._write(source, split, rows)

    def _write(self, source: str, split: Split, rows: int) -> None:
        stream = self._streams[source, split]
        packed = stream.packer.take(rows)
        path = self.folder / shard_name(source, split, stream.shards)
        size, digest = write_shard(path, packed.rows_NT, packed.documents, packed.contents)
        self._write_rejected()
        shard = Shard(
            source=source,
            split=split,
            file=path.name,
            rows=rows,
            bytes=size,
            sha256=digest,
            subsets=packed.subsets,
            next=packed.next,
        )
        append_shard(self.folder, shard)
        stream.shards += 1
        self._subsets = total([*self._subsets, *packed.subsets])

    def _judge(self, *, is_due: bool) -> None:
        self._judge_files()
        if not is_due or len(self._rejected) <= self.max_rejected * self.documents:
            return
        self._write_rejected()
        number, record, reason = min(self._rejected)
        file = self.header.files[number]
        raise UserError(
            f"data.corpus: {len(self._rejected)} of {self.documents} documents can't be read, more than"
            f" data.max_rejected={self.max_rejected:g}; the first: {file}:{record}: {reason}"
            f" (all: {self.folder / REJECTED})"
        )

    def _judge_files(self) -> None:
        """A damaged file is one rejected document, and who knows how many more that nobody will have read."""
        if self._lost and self.max_rejected < 1:
            self._write_rejected()
            number, record, reason = min(self._lost)
            raise UserError(
                f"data.corpus: {self.header.files[number]}:{record}: {reason}; want the whole file,"
                " or data.max_rejected=1 to go without the rest of it"
            )

    def _write_rejected(self) -> None:
        """All of them, as of now; those that a later attempt finds again it takes from the corpus."""
        if self._rejected and len(self._rejected) != self._written_rejected:
            files = self.header.files
            lines = [(files[file], record, reason, file) for file, record, reason in sorted(self._rejected)]
            table = pa.table([list(column) for column in zip(*lines, strict=True)], schema=_REJECTED_SCHEMA)
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink)
            atomic_write(self.folder / REJECTED, sink.getvalue())
            self._written_rejected = len(self._rejected)

    def _earlier_rejected(self) -> list[tuple[int, int, str]]:
        path = self.folder / REJECTED
        if not path.exists():
            return []
        try:
            found = pq.read_table(path, schema=_REJECTED_SCHEMA).to_pylist()
            lines = [(line["number"], line["line"], line["reason"]) for line in found]
            return [line for line in lines if line[:2] < _order(self._restart[self._parts[line[0]]])]
        except (OSError, pa.ArrowException, ValueError, IndexError, TypeError) as error:
            raise damaged(path, error) from None


class _Stream:
    """The rows of one split of one source."""

    def __init__(self, shards: pa.Table, header: Header, data: DataConfig) -> None:
        """
        Args:
            shards: the lines of those that are committed, with their places.
        """
        self.shards = shards.num_rows
        self.begin = Place(**shards["next"][-1].as_py()) if self.shards else None
        if header.kind != "sentence_pairs":
            self.packer = Packer(header.row_length, begin=self.begin)
        else:
            short = data.pairs.short_share
            self.packer = PairPacker(header.sequence_length, short_share=short, begin=self.begin)


def _order(place: Place) -> tuple[int, int]:
    return place.file, place.record


def _damaged_files(rejected: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Those of them that are the rest of a file."""
    return [one for one in rejected if one[2].startswith(DAMAGED)]


def _documents(block: pa.Table, here: np.ndarray, seen: np.ndarray) -> Documents:
    """Those lines of a block."""
    tokens_N, lengths_D = _lists(block.column("tokens"), here)
    subsets = block.column("subset").to_pylist()
    return Documents(
        tokens_N=tokens_N,
        lengths_D=lengths_D,
        subsets_D=[subsets[number] for number in here],
        files_D=block.column("file").to_numpy()[here].astype(np.int64),
        records_D=block.column("record").to_numpy()[here],
        seen_D=seen[here],
        bytes_D=block.column("bytes").to_numpy()[here],
        sentences_N=_lists(block.column("sentences"), here)[0],
        contents_D=_contents(block, here),
    )


def _lists(column: pa.ChunkedArray, here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those lists of a column end to end, and the length of each."""
    lists = column.combine_chunks()
    offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
    starts, ends = offsets[:-1][here], offsets[1:][here]
    if len(here) == len(lists):
        found = values[offsets[0] : offsets[-1]]
    else:
        found = np.concatenate([values[start:end] for start, end in zip(starts, ends, strict=True)])
    return found, (ends - starts).astype(np.int64)


def _contents(block: pa.Table, here: np.ndarray) -> list[bytes]:
    return block.column("content").take(here).to_pylist() if "content" in block.column_names else []
