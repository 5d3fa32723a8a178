"""What a folder of token shards holds by now: the header and the committed shards, read once and then followed.

There may be tens of thousands of shards, each with counts of many subsets. So lines are read as columns, and by readers
of rows only as far as `_COUNTS`, which is a tenth of them.
"""

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tokendrop.atomic import atomic_write
from tokendrop.data.shards.format import (
    FORMAT,
    MANIFEST,
    MOST,
    SHARDS,
    SPLITS,
    Committed,
    Header,
    ShardFile,
    Split,
    SubsetCounts,
    damaged,
    open_plain,
    shard_name,
    telling_damage,
)
from tokendrop.errors import UserError

_COUNTS = b', "subsets": '
"""In a line: from here on, what preparation alone needs."""

_FILES = pa.schema(
    [(name, pa.string()) for name in ("source", "split", "file")]
    + [(name, pa.int64()) for name in ("rows", "bytes")]
    + [("sha256", pa.string())]
)
_SUBSETS = pa.struct([("subset", pa.string()), *((name, pa.int64()) for name in ("documents", "tokens", "bytes"))])
_NEXT = pa.struct([(name, pa.int64()) for name in ("file", "record", "token", "seen")])
_WHOLE = pa.schema([*_FILES, ("subsets", pa.list_(_SUBSETS)), ("next", _NEXT)])
_NUMBERS = ("format", "sequence_length", "row_length", "vocab_size", "documents", "rejected", "tokens")
_HEADER = pa.schema(
    [(name, pa.int64()) for name in _NUMBERS]
    + [(name, pa.string()) for name in ("kind", "tokenizer_sha256")]
    + [(name, pa.list_(pa.string())) for name in ("sources", "files")]
    + [("is_complete", pa.bool_()), ("rows", pa.list_(pa.int64())), ("subsets", pa.list_(_SUBSETS))]
)
_POSITIVE = {"rows", "row_length"}


@dataclass(frozen=True)
class Manifest:
    """A folder of token shards as far as it is committed."""

    header: Header
    table: pa.Table
    """A line for each shard, in the order in which they were committed: the fields of `ShardFile`, or of `Shard`."""

    @cached_property
    def shards(self) -> tuple[ShardFile, ...]:
        """All committed shards, in the order in which they were committed."""
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
    """As `read_manifest`, errors too, with the counts of subsets and the places that preparation goes on from."""
    header, path = read_header(folder), folder / SHARDS
    with telling_damage(path):
        content = _committed(_content(path)) if path.exists() else b""
        manifest = Manifest(header, _parse(content, _WHOLE, _FILES.empty_table(), header.sources))
    _check_sum(path, manifest)
    return manifest


def order_lines(folder: Path) -> Manifest:
    """Put the lines of committed shards into the order of sources, splits and numbers; raises as `read_manifest`."""
    manifest, path = read_manifest(folder), folder / SHARDS
    order = manifest.table.append_column("line", [pa.array(range(manifest.table.num_rows))]).sort_by(
        [("source", "ascending"), ("split", "ascending"), ("line", "ascending")]
    )
    lines = _committed(_content(path)).split(b"\n") if path.exists() else []
    atomic_write(path, b"".join(lines[number] + b"\n" for number in order["line"].to_pylist()))
    return replace(manifest, table=order.drop_columns("line"))


def read_header(folder: Path) -> Header:
    """What manifest.json says; raises as `ManifestReader.refresh` does, and UserError for another format."""
    path = folder / MANIFEST
    with telling_damage(path):
        told = _from_json(_content(path))
    written = told.get("format", FORMAT) if isinstance(told, dict) else FORMAT
    if written != FORMAT:
        raise UserError(
            f"{folder}: token shards of format {repr(written)[:20]}, this version reads {FORMAT};"
            " prepare the data again"
        )
    with telling_damage(path):
        columns = {field.name: _column([_value(told, field.name)], field) for field in _HEADER}
        values = {name: column[0].as_py() for name, column in columns.items()}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        subsets = tuple(SubsetCounts(**one) for one in values["subsets"])
        return Header(**{**values, **lists, "subsets": subsets})


def shard_files(table: pa.Table) -> list[ShardFile]:
    """The shards of some lines."""
    return [ShardFile(**line) for line in table.select(_FILES.names).to_pylist()]


def sum_by_subset(table: pa.Table) -> tuple[SubsetCounts, ...]:
    """The counts of some lines, which have them, added up by subset, by name."""
    names = [field.name for field in fields(SubsetCounts)]
    one = _all_subsets(table["subsets"])
    sums = one.group_by("subset").aggregate([(name, "sum") for name in names[1:]]).sort_by("subset")
    return tuple(SubsetCounts(**line) for line in sums.rename_columns({f"{n}_sum": n for n in names[1:]}).to_pylist())


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

    Args:
        before: the lines that come earlier in the file.
    Raises:
        ValueError: a line is wrong; the message names it.
    """
    lines = content.split(b"\n")[:-1]
    try:
        table = _read_columns(lines, schema)
    except (ValueError, RecursionError):
        for number, line in enumerate(lines, start=before.num_rows + 1):
            try:
                _read_columns([line], schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from None
        raise
    _check_names(table, before, sources)
    return table


def _read_columns(lines: list[bytes], schema: pa.Schema) -> pa.Table:
    """One JSON object a line, all of them at once; ValueError names the key that is wrong."""
    if schema is _FILES:
        lines = [line.partition(_COUNTS)[0] + b"}" for line in lines]
    told = _from_json(b"[" + b",".join(lines) + b"]")
    if len(told) != len(lines):
        raise ValueError("want one object a line")
    columns = [_column([_value(one, field.name) for one in told], field) for field in schema]
    return pa.table(columns, schema)


def _from_json(content: bytes) -> Any:
    """JSON; a number with a fraction becomes text, which no column of numbers takes."""
    return json.loads(content, parse_float=str)


def _value(told: Any, key: str) -> Any:
    if not isinstance(told, dict) or key not in told:
        raise ValueError(f"{key}: this key is needed and missing")
    return told[key]


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    """The values of one key; ValueError where one is not what the key holds, or is a number that can't be."""
    kind, least = field.type, 1 if field.name in _POSITIVE else 0
    is_list = pa.types.is_list(kind)  # pyarrow would take text for a list of letters
    with suppress(pa.ArrowException, ValueError, TypeError, OverflowError):
        column = pa.array(values, kind)
        if _is_sound(column, least) and all(isinstance(value, list) for value in values if is_list):
            return column
    number = f"a whole number from {least} to {MOST - 1}"
    wanted = {pa.int64(): number, pa.string(): "text", pa.bool_(): "true or false"}
    raise ValueError(f"{field.name}: want {wanted.get(kind, kind)}")


def _is_sound(column: pa.Array, least: int = 0) -> bool:
    """Whether nothing is null and every number can be."""
    if column.null_count:
        return False
    if pa.types.is_nested(column.type):
        parts = column.flatten()
        return all(map(_is_sound, [parts] if pa.types.is_list(column.type) else parts))
    if len(column) and pa.types.is_int64(column.type):
        numbers = column.to_numpy()
        return least <= numbers.min() and numbers.max() < MOST
    return True


def _all_subsets(lists: pa.ChunkedArray) -> pa.Table:
    return pa.Table.from_struct_array(lists.combine_chunks().flatten())


def _check_names(table: pa.Table, before: pa.Table, sources: tuple[str, ...]) -> None:
    """A file has the name that its place in its stream gives it: so each stream is whole, and no name leads away."""
    places: Counter[tuple[str, Split]] = Counter()
    named = zip(*(table[key].to_pylist() for key in ("source", "split", "file")), strict=True)
    for line, (source, split, file) in enumerate(named, start=before.num_rows + 1):
        if source not in sources or split not in SPLITS:
            raise ValueError(f"line {line}: want a shard of {', '.join(sources)}, got {file[:80]!r}")
        if (source, split) not in places:
            places[source, split] = _stream(before, source, split).num_rows
        if file != (wanted := shard_name(source, split, places[source, split])):
            raise ValueError(f"line {line}: want {wanted}, got {file[:80]!r}")
        places[source, split] += 1


def _stream(table: pa.Table, source: str, split: str) -> pa.Table:
    return table.filter((pc.field("source") == source) & (pc.field("split") == split))
