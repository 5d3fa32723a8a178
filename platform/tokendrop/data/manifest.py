"""What a folder of token shards holds by now: the header and the committed shards, read once and then followed.

There may be tens of thousands of shards, each with counts of many sets. So lines are read as columns, and by readers of
rows only as far as `_COUNTS`, which is a tenth of them.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tokendrop.config.load import build
from tokendrop.data.commit import write_whole
from tokendrop.data.order import Committed
from tokendrop.data.shards import (
    FORMAT,
    MANIFEST,
    MOST,
    SHARDS,
    SPLITS,
    Header,
    SetCounts,
    Shard,
    ShardFile,
    Split,
    damaged,
    open_plain,
    shard_name,
    telling_damage,
)
from tokendrop.errors import UserError

_COUNTS = b', "sets": '
"""In a line: from here on, what preparation alone needs."""

_FILES = pa.schema(
    [(name, pa.string()) for name in ("source", "split", "file")]
    + [(name, pa.int64()) for name in ("rows", "bytes")]
    + [("sha256", pa.string())]
)
_SETS = pa.struct([("set", pa.string()), *((name, pa.int64()) for name in ("documents", "tokens", "bytes"))])
_NEXT = pa.struct([(name, pa.int64()) for name in ("file", "record", "token", "seen")])
_WHOLE = pa.schema([*_FILES, ("sets", pa.list_(_SETS)), ("next", _NEXT)])


@dataclass(frozen=True)
class Manifest:
    """A folder of token shards as far as it is committed."""

    header: Header
    table: pa.Table
    """A line for each shard, in the order in which they were committed: the fields of `ShardFile`, or of `Shard`."""

    @cached_property
    def shards(self) -> tuple[ShardFile, ...]:
        return tuple(shard_files(self.table))

    def of(self, source: str, split: Split) -> list[ShardFile]:
        """The shards of one stream, in order."""
        return shard_files(self.stream(source, split))

    def stream(self, source: str, split: Split) -> pa.Table:
        """The lines of one stream, by the number of the shard."""
        return _stream(self.table, source, split)

    def committed(self, split: Split) -> Committed:
        """Rows at hand, by source."""
        rows = tuple(int(self.stream(source, split)["rows"].to_numpy().sum()) for source in self.header.sources)
        return Committed(rows, self.header.is_complete)


class ManifestReader:
    """Reads the manifest of a folder, and when asked again what was committed since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: Manifest | None = None
        self._header_was: tuple[int, ...] = ()
        self._lines_were, self._end = (0, 0), 0

    def refresh(self) -> Manifest:
        """The manifest as of now.

        Raises:
            DamagedDataError: there is none, or it can't be read.
            UserError: another version of tokendrop wrote it.
        """
        # before the lines: where it says complete, all of them are there
        header, is_new_header = self._header()
        path = self.folder / SHARDS
        with telling_damage(path):
            content, is_new_file = self._new_lines(path) if path.exists() else (b"", False)
            if self._read is not None and not content and not is_new_header and not is_new_file:
                return self._read
            before = _FILES.empty_table() if self._read is None or is_new_file else self._read.table
            table = _parse(content, _FILES, before, header.sources)
            self._end += len(content)
        self._read = Manifest(header, pa.concat_tables([before, table]))
        _check_sum(path, self._read)
        return self._read

    def _header(self) -> tuple[Header, bool]:
        path = self.folder / MANIFEST
        with telling_damage(path):
            found = path.stat()
        was, self._header_was = self._header_was, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if self._read is not None and was == self._header_was:
            return self._read.header, False
        return read_header(self.folder), True

    def _new_lines(self, path: Path) -> tuple[bytes, bool]:
        """What was appended, and whether the file is another one: once all is prepared, its lines are put in order."""
        with open_plain(path) as file:
            found = os.fstat(file.fileno())
            is_new = (found.st_dev, found.st_ino) != self._lines_were or found.st_size < self._end
            self._lines_were = found.st_dev, found.st_ino
            self._end = 0 if is_new else self._end
            file.seek(self._end)
            return _committed(file.read()), is_new


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, once; raises as `ManifestReader.refresh` does."""
    return ManifestReader(folder).refresh()


def read_counts(folder: Path) -> Manifest:
    """As `read_manifest`, with the counts of sets and the places that preparation goes on from."""
    header, path = read_header(folder), folder / SHARDS
    with telling_damage(path):
        content = _committed(_content(path)) if path.exists() else b""
        manifest = Manifest(header, _parse(content, _WHOLE, _FILES.empty_table(), header.sources))
    _check_sum(path, manifest)
    return manifest


def order_lines(folder: Path) -> Manifest:
    """Put the lines of committed shards into the order of sources, splits and numbers, and read them."""
    manifest, path = read_manifest(folder), folder / SHARDS
    order = manifest.table.append_column("line", [pa.array(range(manifest.table.num_rows))]).sort_by(
        [("source", "ascending"), ("split", "ascending"), ("line", "ascending")]
    )
    lines = _committed(_content(path)).split(b"\n") if path.exists() else []
    write_whole(path, b"".join(lines[number] + b"\n" for number in order["line"].to_pylist()))
    return replace(manifest, table=order.drop_columns("line"))


def read_header(folder: Path) -> Header:
    """What manifest.json says; raises as `ManifestReader.refresh` does."""
    path = folder / MANIFEST
    with telling_damage(path):
        told = json.loads(_content(path))
    written = told.get("format", FORMAT) if isinstance(told, dict) else FORMAT
    if written != FORMAT:
        raise UserError(
            f"{folder}: token shards of format {repr(written)[:20]}, this version reads {FORMAT};"
            " prepare the data again"
        )
    with telling_damage(path):
        return build(Header, told, "")


def shard_files(table: pa.Table) -> list[ShardFile]:
    """The shards of some lines."""
    return [ShardFile(**line) for line in table.select(_FILES.names).to_pylist()]


def sum_by_set(table: pa.Table) -> tuple[SetCounts, ...]:
    """The counts of some lines, which have them, added up by set, by name."""
    names = [field.name for field in fields(SetCounts)]
    one = _all_sets(table["sets"])
    sums = one.group_by("set").aggregate([(name, "sum") for name in names[1:]]).sort_by("set")
    return tuple(SetCounts(**line) for line in sums.rename_columns({f"{n}_sum": n for n in names[1:]}).to_pylist())


def _content(path: Path) -> bytes:
    with open_plain(path) as file:
        return file.read()


def _committed(content: bytes) -> bytes:
    """Whole lines; one that is being written does not count."""
    return content[: content.rfind(b"\n") + 1]


def _check_sum(path: Path, manifest: Manifest) -> None:
    header = manifest.header
    if header.is_complete and header.rows != tuple(sum(manifest.committed(split).rows) for split in SPLITS):
        raise damaged(path, f"its shards do not add up to the rows that {MANIFEST} tells of")


def _parse(content: bytes, schema: pa.Schema, before: pa.Table, sources: tuple[str, ...]) -> pa.Table:
    """Lines as columns, in the order in which they are written.

    Raises:
        ValueError: a line is wrong; the message names it.
    """
    if not content:
        return schema.empty_table()
    # where a line is wrong, the slow way below names it
    with suppress(pa.ArrowException, ValueError, TypeError, LookupError, OverflowError, AttributeError):
        table = _read_columns(content.split(b"\n")[:-1], schema)
        if _is_sound(table) and _named_rightly(table, before, sources):
            return table
    lines = enumerate(content.split(b"\n")[:-1], start=before.num_rows + 1)
    shards = [build(Shard, json.loads(line), f"line {number}") for number, line in lines]
    _check_names(shards, before, sources)
    return pa.Table.from_pylist([asdict(shard) for shard in shards], _WHOLE).select(schema.names)


def _read_columns(lines: list[bytes], schema: pa.Schema) -> pa.Table:
    if schema is _FILES:
        lines = [line.partition(_COUNTS)[0] + b"}" for line in lines]
    told = json.loads(b"[" + b",".join(lines) + b"]", parse_float=_refuse)
    sizes = Counter(map(len, told)), Counter(len(one) for line in told for one in line.get("sets", ()))
    if sizes[0] != {len(schema): len(lines)} or sizes[1].keys() - {_SETS.num_fields}:
        raise ValueError("want other keys")
    return pa.Table.from_pylist(told, schema)


def _refuse(number: str) -> None:
    raise ValueError(f"want whole numbers, got {number}")


def _all_sets(lists: pa.ChunkedArray) -> pa.Table:
    return pa.Table.from_struct_array(lists.combine_chunks().flatten())


def _is_sound(table: pa.Table) -> bool:
    """Whether every field is there and every number can be; vectorised, and so without a word on where it is not."""
    flat = table.flatten()
    if "sets" in flat.column_names:
        if flat["sets"].null_count or not _is_sound(_all_sets(flat["sets"])):
            return False
        flat = flat.drop_columns("sets")
    for name in flat.column_names:
        column, least = flat[name], 1 if name == "rows" else 0
        if column.null_count:
            return False
        if len(column) and pa.types.is_int64(column.type):
            numbers = column.to_numpy()
            if numbers.min() < least or numbers.max() >= MOST:
                return False
    return True


def _named_rightly(table: pa.Table, before: pa.Table, sources: tuple[str, ...]) -> bool:
    """As `_check_names`, at once for all lines of a stream."""
    streams = table.group_by(["source", "split"]).aggregate([])
    for source, split in zip(*(column.to_pylist() for column in streams.columns), strict=True):
        if source not in sources or split not in SPLITS:
            return False
        first, found = _stream(before, source, split).num_rows, _stream(table, source, split)["file"].to_pylist()
        if found != [shard_name(source, split, first + number) for number in range(len(found))]:
            return False
    return True


def _check_names(shards: Iterable[Shard], before: pa.Table, sources: tuple[str, ...]) -> None:
    """A file has the name that its place in its stream gives it: so each stream is whole, and no name leads away."""
    places: dict[tuple[str, Split], int] = {}
    for line, shard in enumerate(shards, start=before.num_rows + 1):
        stream = shard.source, shard.split
        place = places.setdefault(stream, _stream(before, *stream).num_rows)
        wanted = shard_name(*stream, place) if shard.source in sources else f"a shard of {', '.join(sources)}"
        if shard.source not in sources or shard.file != wanted:
            raise ValueError(f"line {line}: want {wanted}, got {shard.file[:80]!r}")
        places[stream] += 1


def _stream(table: pa.Table, source: str, split: str) -> pa.Table:
    return table.filter((pc.field("source") == source) & (pc.field("split") == split))
