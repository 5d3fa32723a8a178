"""Shards: the same bytes whatever the blocks, and whoever dies when."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folders import Document, all_tokens, blocks, bytes_of, open_writer, write_folder
from tokendrop.data.shards.format import REJECTED, SHARDS, SPLITS
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError

DOCUMENTS = st.builds(
    Document,
    tokens=st.lists(st.integers(0, 60_000), max_size=30),
    split=st.sampled_from(["train", "train", "train", "validation", "test"]),
    subset=st.sampled_from(["", "web", "code"]),
    reason=st.sampled_from(["", "", "", "not valid JSON"]),
)
FILES = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.lists(DOCUMENTS, max_size=15)), min_size=1, max_size=3)
FEWER = settings(max_examples=20)  # every shard is synced to the disk


class KilledError(Exception):
    """The process ends here."""


@FEWER
@given(files=FILES, rows=st.integers(3, 40), one=st.integers(1, 9), other=st.integers(1, 9))
def test_shards_hold_each_split_of_each_source_in_order_whatever_the_blocks(files, rows, one, other):
    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name) / "a", Path(name) / "b"
        manifest = write_folder(first, files, block=one, rows_per_shard=rows)
        write_folder(second, files, block=other, rows_per_shard=rows)
        assert bytes_of(first) == bytes_of(second)
        assert manifest.header.is_complete
        assert manifest.header.documents == sum(len(documents) for _, documents in files)
        for source in manifest.header.sources:
            for split in SPLITS:
                packed = all_tokens(first, manifest, source, split)
                written = [
                    token
                    for where, documents in files
                    for document in documents
                    if where == source and document.split == split and not document.reason
                    for token in document.tokens
                ]
                assert packed == written[: len(packed)]
                assert len(written) - len(packed) < 5


@FEWER
@given(files=FILES, rows=st.integers(2, 20), block=st.integers(1, 9), kills=st.lists(st.integers(0, 40), max_size=3))
def test_an_attempt_that_goes_on_writes_what_the_first_would_have(files, rows, block, kills):
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        write_folder(whole, files, block=3, rows_per_shard=rows)
        for kill in kills:
            writer = open_writer(killed, files, rows_per_shard=rows)
            for done in blocks(files, writer, block=block)[:kill]:
                writer.add(done)
        write_folder(killed, files, block=block, rows_per_shard=rows)
        assert bytes_of(killed) == bytes_of(whole)


@FEWER
@given(
    files=st.lists(st.lists(DOCUMENTS, min_size=1, max_size=15), min_size=3, max_size=5),
    rows=st.integers(2, 20),
    kills=st.lists(st.integers(0, 40), max_size=3),
)
def test_files_that_are_held_out_whole_go_on_by_themselves(files, rows, kills):
    splits = ["validation", "test", *["train"] * (len(files) - 2)]
    corpus = [
        ("a", [replace(one, split=split) for one in documents]) for documents, split in zip(files, splits, strict=True)
    ]
    given = {"rows_per_shard": rows, "splits": splits}
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        write_folder(whole, corpus, block=3, **given)
        for kill in kills:
            writer = open_writer(killed, corpus, **given)
            for done in blocks(corpus, writer)[:kill]:
                writer.add(done)
        assert write_folder(killed, corpus, **given).header.documents == sum(map(len, files))
        assert bytes_of(killed) == bytes_of(whole)


def test_what_is_trained_on_is_not_read_again_for_held_out_rows_that_are_not_committed(tmp_path):
    corpus = [("a", [Document([0] * 5, split="validation")]), ("a", [Document([0] * 5)] * 40)]
    for _ in range(2):
        writer = open_writer(tmp_path, corpus, rows_per_shard=32, splits=["validation", "train"])
        left = dict(writer.todo())
        for one in blocks(corpus, writer):
            writer.add(one)
    assert left == {0: 0, 1: 32}


def test_rejected_records_come_in_the_order_of_the_corpus_whichever_source_an_attempt_begins_anew(tmp_path):
    bad, rest = Document([], reason="not valid JSON"), [Document([0] * 5, split=split) for split in SPLITS]
    files = [("b", [bad]), ("a", [bad, *rest])]
    write_folder(tmp_path / "whole", files, rows_per_shard=1)
    writer = open_writer(tmp_path / "killed", files, rows_per_shard=1)
    for one in blocks(files, writer, block=9):
        writer.add(one)  # all shards of a are committed; b has none
    write_folder(tmp_path / "killed", files, rows_per_shard=1)
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")


@FEWER
@given(files=FILES, data=st.data())
def test_a_process_may_die_between_any_two_writes(files, data):
    """The shard's file, the rejected records and the manifest's line are three writes; each may be half done."""
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        write_folder(whole, files, rows_per_shard=4)
        die_at = data.draw(st.integers(0, 12))
        torn = data.draw(st.integers(0, 40))
        with pytest.MonkeyPatch.context() as patch:
            calls = iter(range(10**6))

            def dying(function):
                def call(*args, **kwargs):
                    if next(calls) == die_at:
                        raise KilledError
                    return function(*args, **kwargs)

                return call

            from tokendrop.data.prepare import writer

            for step in ("write_shard", "append_shard", "atomic_write"):
                patch.setattr(writer, step, dying(getattr(writer, step)))
            try:
                write_folder(killed, files, rows_per_shard=4)
            except KilledError:
                (killed / ".corpus-train-00001.arrow.0123abcd").write_bytes(b"ARROW1")
                lines = killed / SHARDS
                if torn and lines.exists():
                    lines.write_bytes(lines.read_bytes() + b'{"source": "corpus", "split": "train", "f'[:torn])
        write_folder(killed, files, rows_per_shard=4)
        assert bytes_of(killed) == bytes_of(whole)


def test_rejected_records_are_listed_by_file_and_line(tmp_path):
    bad = Document([], reason="not valid JSON")
    good = Document([1, 2, 3])
    write_folder(tmp_path, [("a", [good, bad]), ("a", [bad, good, bad])])
    found = [(line["file"], line["line"], line["reason"]) for line in pq.read_table(tmp_path / REJECTED).to_pylist()]
    assert found == [("file-0", 2, bad.reason), ("file-1", 1, bad.reason), ("file-1", 3, bad.reason)]
    assert read_manifest(tmp_path).header.rejected == 3


@pytest.mark.parametrize(("share", "stops"), [(0.1, True), (0.24, True), (0.25, False), (1.0, False), (0.0, True)])
def test_preparation_stops_where_more_is_rejected_than_may_be(tmp_path, share, stops):
    files = [("corpus", [Document([1] * 9), Document([], reason="not valid UTF-8"), *[Document([1] * 9)] * 2])]
    if not stops:
        write_folder(tmp_path, files, max_rejected=share)
        return
    sentence = r"1 of 4 documents can't be read, more than data\.max_rejected=.*; the first: file-0:2: not valid UTF-8"
    with pytest.raises(UserError, match=sentence):
        write_folder(tmp_path, files, max_rejected=share)
    assert pq.read_table(tmp_path / REJECTED).num_rows == 1
    assert not read_manifest(tmp_path).header.is_complete
    assert write_folder(tmp_path, files, max_rejected=0.5).header.rejected == 1
