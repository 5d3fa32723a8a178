"""Folders of tens of thousands of shards: opened at once, followed by what is new, looked at once."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokendrop.data.shards.manifest as manifest_module
from folders import Document, blocks, open_writer, write_folder
from tokendrop.data.read.inspection import count_tokens
from tokendrop.data.read.order import ROW_BITS
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.files import check_files
from tokendrop.data.shards.format import FORMAT, SHARDS, Header, SubsetCounts, shard_name, total
from tokendrop.data.shards.manifest import ManifestReader, order_lines, read_manifest

SUBSETS = [f"set number {number}" for number in range(22)]


def write_lines(folder: Path, shards: int, *, subsets: list[str], sources: tuple[str, ...] = ("corpus",)) -> None:
    """The manifest of a folder without its files; sources take turns."""
    folder.mkdir()
    Header(
        format=FORMAT,
        kind="text",
        sequence_length=2048,
        row_length=2049,
        vocab_size=50257,
        tokenizer_sha256="",
        sources=sources,
        files=("x",),
    ).write(folder)
    counts = json.dumps([{"subset": one, "documents": 123, "tokens": 381_234, "bytes": 1_723_232} for one in subsets])
    with (folder / SHARDS).open("w") as file:
        for line in range(shards):
            number, turn = divmod(line, len(sources))
            name = shard_name(sources[turn], "train", number)
            file.write(
                f'{{"source": "{sources[turn]}", "split": "train", "file": "{name}",'
                f' "rows": 4096, "bytes": {10**7 + number}, "sha256": "{line:064x}", "subsets": {counts},'
                f' "next": {{"file": 0, "record": {number}, "token": 77, "seen": {number}}}}}\n'
            )


def test_forty_thousand_shards_of_22_sets_open_faster_than_their_lines_are_parsed(tmp_path):
    write_lines(tmp_path / "many", 40_000, subsets=SUBSETS)
    opened, parsed = [], []  # in turns, in seconds of this process alone: machines differ, and others may be busy
    for _ in range(3):
        begin = time.process_time()
        rows = Rows(tmp_path / "many", "train")
        opened.append(time.process_time() - begin)
        assert rows.committed.rows == (40_000 * 4096,)
        begin = time.process_time()
        with (tmp_path / "many" / SHARDS).open("rb") as file:
            for line in file:
                json.loads(line)
        parsed.append(time.process_time() - begin)
    # 0.4 s and 0.86 s on two cores of an AMD EPYC
    assert min(opened) < 0.75 * min(parsed), (opened, parsed)


def test_shards_are_in_the_order_of_their_numbers_beyond_five_digits(tmp_path):
    folder, sources = tmp_path / "long", ("b", "a")
    write_lines(folder, 2 * 100_002, subsets=[], sources=sources)
    order_lines(folder)
    last = read_manifest(folder).of("a", "train")[99_998:]
    assert [shard.file for shard in last] == [shard_name("a", "train", number) for number in range(99_998, 100_002)]
    rows = Rows(folder, "train")
    firsts, inside = rows.places((1 << ROW_BITS) + np.array([99_999, 100_000, 100_001]) * 4096 + 5)
    assert inside == [5, 5, 5]
    assert [rows.shard_at(first) for first in firsts] == last[1:]


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Bytes that are read of each file of a manifest, by its name."""
    counts: Counter[str] = Counter()
    really = manifest_module.open_plain

    def open_counted(path: Path):
        file = really(path)
        read = file.read
        file.read = lambda *size: counts.update({path.name: len(found := read(*size))}) or found
        return file

    monkeypatch.setattr(manifest_module, "open_plain", open_counted)
    return counts


FILES = [
    (source, [Document([n] * 5, split="validation" if n % 5 == 0 else "train", subset="xy"[n % 2]) for n in range(40)])
    for source in ("a", "b")
]


def test_following_reads_only_what_came_since(tmp_path, bytes_read):
    writer = open_writer(tmp_path, FILES, rows_per_shard=2)
    growing = blocks(FILES, writer, block=2)
    train = Rows(tmp_path, "train", reader=(reader := ManifestReader(tmp_path)))
    validation = Rows(tmp_path, "validation", reader=reader)
    for block in growing:
        writer.add(block)
        for rows in (train, validation, train):
            rows.refresh()
    assert bytes_read[SHARDS] == (tmp_path / SHARDS).stat().st_size > 1000
    assert train.committed == read_manifest(tmp_path).committed("train")


@given(pauses=st.lists(st.integers(1, 6), max_size=8), torn=st.booleans())
def test_what_is_followed_is_what_is_read_at_once(tmp_path_factory, pauses, torn):
    folder = tmp_path_factory.mktemp("growing")
    writer = open_writer(folder, FILES, rows_per_shard=3)
    reader, waiting = ManifestReader(folder), blocks(FILES, writer, block=3)
    for pause in pauses:
        for _ in range(min(pause, len(waiting))):
            writer.add(waiting.pop(0))
        assert reader.refresh() == read_manifest(folder)
    if torn:
        whole = (folder / SHARDS).read_bytes() if (folder / SHARDS).exists() else b""
        (folder / SHARDS).write_bytes(whole + b'{"source": "a"')
        assert reader.refresh() == read_manifest(folder)
        writer = open_writer(folder, FILES, rows_per_shard=3)
        waiting = blocks(FILES, writer, block=3)
    for block in waiting:
        writer.add(block)
    assert writer.finish() == reader.refresh() == read_manifest(folder)
    assert reader.refresh().header.is_complete


def test_no_shard_is_looked_at_twice(tmp_path, monkeypatch):
    writer = open_writer(tmp_path, FILES, rows_per_shard=2)
    looks: Counter[str] = Counter()
    for name in ("stat", "lstat", "open"):
        really = getattr(os, name)

        def look(path, *rest, really=really, **more):
            looks.update([os.path.basename(os.fspath(path))] if not isinstance(path, int) else [])
            return really(path, *rest, **more)

        monkeypatch.setattr(os, name, look)
    reader = ManifestReader(tmp_path)
    train, validation = (Rows(tmp_path, split, reader=reader) for split in ("train", "validation"))
    for block in blocks(FILES, writer, block=2):
        writer.add(block)
        for rows in (train, validation):
            rows.refresh()
            for source, count in enumerate(rows.committed.rows):
                rows.read((source << ROW_BITS) + np.arange(count))
    shards = {shard.file for shard in train.manifest.shards}
    assert {name: count for name, count in looks.items() if name.endswith(".arrow")} == dict.fromkeys(shards, 1)
    looks.clear()
    check_files(tmp_path, writer.finish())
    assert {name: count for name, count in looks.items() if name in shards} == dict.fromkeys(shards, 1)


def test_counts_read_as_columns_are_those_of_the_lines(tmp_path):
    write_folder(tmp_path, FILES, rows_per_shard=3)
    lines = [json.loads(line) for line in (tmp_path / SHARDS).read_text().splitlines()]
    expected = total(SubsetCounts(**one) for line in lines for one in line["subsets"])
    found = count_tokens(tmp_path).subsets
    assert [(one.name, one.documents, one.tokens, one.bytes) for one in found] == [
        (one.subset, one.documents, one.tokens, one.bytes) for one in expected
    ]
