"""Token shards: what was packed is what is read, and damage is named."""

import json
import random
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from folders import Document, blocks, data_config, numbered_rows, open_writer, write_folder
from tokendrop.atomic import atomic_folder, atomic_write
from tokendrop.config.data import SourceConfig
from tokendrop.data.read.order import ROW_BITS, NotPreparedError, first_ids
from tokendrop.data.read.row_reader import FAILED, MappedSamples, Rows, held_out_ids, sample_order
from tokendrop.data.shards.files import check_files, read_documents
from tokendrop.data.shards.format import FORMAT, MANIFEST, SHARDS, TOKENIZER
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import DamagedDataError, UserError

FINGERPRINT = "0123456789abcdef"  # the name of a folder that preparation makes


@given(count=st.integers(1, 30), rows_per_shard=st.integers(2, 40), data=st.data())
def test_rows_read_are_the_rows_written_in_any_order(count, rows_per_shard, data):
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), numbered_rows(count), rows_per_shard=rows_per_shard)
        wanted = data.draw(st.lists(st.integers(0, count - 1), max_size=12))
        epoch = data.draw(st.integers(0, 3))
        ids = np.array(wanted, np.int64) + (epoch << ROW_BITS)
        found = Rows(Path(name), "train").read(ids)
    assert found.dtype == np.int64
    assert found.tolist() == [[number] * 5 for number in wanted]


def test_a_row_that_is_not_there_is_an_error(tmp_path):
    write_folder(tmp_path, numbered_rows(3))
    for row in (3, 1000):
        with pytest.raises(IndexError, match=f"row {row} of source 0: there are 3"):
            Rows(tmp_path, "train").read(np.array([row]))


def test_many_shards_hold_no_files_open(tmp_path):
    write_folder(tmp_path, numbered_rows(60), rows_per_shard=1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    rows = Rows(tmp_path, "train")
    rows.read(np.arange(60))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_held_out_rows_are_shared_out_by_weight(tmp_path):
    files = [(source, [Document([0] * 5), *[Document([0] * 5, split="validation")] * 9]) for source in "ab"]
    sources = tuple(SourceConfig(name=name, corpus=("x",), weight=weight) for name, weight in (("a", 3.0), ("b", 1.0)))
    data = data_config(corpus=(), sources=sources)
    write_folder(tmp_path, files)
    ids = held_out_ids(data, Rows(tmp_path, "validation").committed, 8)
    assert ids.tolist() == [*first_ids(0, 6), *first_ids(1, 2)]


def test_a_source_whose_documents_make_no_held_out_row_is_left_out_of_validation(tmp_path):
    held_out = {"a": 0, "b": 9}
    files = [
        (source, [Document([0] * 5), *[Document([0] * 5, split="validation")] * count])
        for source, count in held_out.items()
    ]
    sources = tuple(SourceConfig(name=name, corpus=("x",), weight=w) for name, w in (("a", 1000.0), ("b", 1.0)))
    write_folder(tmp_path, files)
    ids = held_out_ids(data_config(corpus=(), sources=sources), Rows(tmp_path, "validation").committed, 8)
    assert ids.tolist() == [*first_ids(1, 8)]


def test_training_follows_rows_as_they_are_committed_and_hears_of_a_failure(tmp_path, monkeypatch):
    files = numbered_rows(40)
    whole = tmp_path / "whole"
    write_folder(whole, files, rows_per_shard=4)
    data = data_config(shuffle_rows=8)
    expected = MappedSamples(Rows(whole, "train"), sample_order(data, seed=1)).at(np.arange(40))

    folder = tmp_path / "growing"
    writer = open_writer(folder, files, rows_per_shard=4)
    growing = blocks(files, writer, block=1)
    samples = MappedSamples(Rows(folder, "train"), sample_order(data, seed=1))
    seconds = count(0.0, 0.2)  # which pass where it is waited for, and nowhere else
    grows = SimpleNamespace(sleep=lambda _: writer.add(growing.pop(0)), monotonic=lambda: next(seconds))
    monkeypatch.setattr("tokendrop.data.read.row_reader.time", grows)
    for position in range(40 // 8 * 8):
        ids, rows = samples.at(np.array([position]))
        assert ids.tolist() == expected[0][[position]].tolist()
        assert rows.tolist() == expected[1][[position]].tolist()
        assert len(growing) >= 40 - position // 8 * 8 - 8  # it did not wait for more than its window
    (folder / FAILED).write_text("the corpus is gone")
    looks = [None, None, (folder / FAILED).unlink, None, lambda: (folder / FAILED).write_text("it is gone again")]
    grows.sleep = lambda _: looks and (looks.pop(0) or (lambda: None))()
    with pytest.raises(UserError, match=r"^it is gone again$"):  # the first note was taken back
        samples.at(np.array([40]))
    with pytest.raises(NotPreparedError):
        samples.order.sample_ids(np.array([40]), samples.rows.committed)


@pytest.mark.parametrize("place", [0, 5, 11], ids="rank {}".format)
def test_all_ranks_wait_for_the_samples_of_their_step_until_the_last_of_them_is_there(tmp_path, monkeypatch, place):
    files = numbered_rows(40)
    writer = open_writer(tmp_path, files, rows_per_shard=4)
    growing = blocks(files, writer, block=1)
    samples = MappedSamples(Rows(tmp_path, "train"), sample_order(data_config(shuffle_rows=8), seed=1), together=12)
    grows = SimpleNamespace(sleep=lambda _: writer.add(growing.pop(0)), monotonic=lambda: 0.0)
    monkeypatch.setattr("tokendrop.data.read.row_reader.time", grows)
    committed = [(samples.at(np.array([first + place])), samples.rows.committed.rows[0])[1] for first in (0, 12)]
    assert committed == [16, 24]  # windows of 8 rows


def test_rows_that_were_committed_before_a_failure_are_read(tmp_path):
    files = numbered_rows(40)
    writer = open_writer(tmp_path, files, rows_per_shard=4)
    samples = MappedSamples(Rows(tmp_path, "train"), sample_order(data_config(shuffle_rows=8), seed=1))
    for block in blocks(files, writer, block=1):
        writer.add(block)
    (tmp_path / FAILED).write_text("the corpus is gone")
    ids, _ = samples.at(np.arange(8))
    assert sorted(ids.tolist()) == [*range(8)]


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    written = write_folder(tmp_path, numbered_rows(9), rows_per_shard=2)
    assert read_manifest(tmp_path) == written
    assert written.header.rows == (9, 1, 0)
    assert read_documents(tmp_path, written.shards[1], [0])[0][0]["record"] == 3


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", "null", '{"rows": "x"}', "\x00", "[" * 100_000])
@pytest.mark.parametrize("file", [MANIFEST, SHARDS])
def test_a_damaged_manifest_is_named(tmp_path, file, text):
    folder = tmp_path / FINGERPRINT
    write_folder(folder, numbered_rows(3))
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text + "\n")
    with pytest.raises(DamagedDataError, match=rf"^{folder}/{file}: damaged .* remove {folder} and prepare"):
        read_manifest(folder)


def test_shards_of_another_version_are_told_from_damaged_ones(tmp_path):
    written = write_folder(tmp_path, numbered_rows(2))
    replace(written.header, format=FORMAT - 1).write(tmp_path)
    manifest = tmp_path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"rows"', '"of_old"'))
    with pytest.raises(UserError, match=f"of format {FORMAT - 1}, this version reads {FORMAT}; prepare the data again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("sequence_length", "long"), ("sources", [3]), ("vocab_size", None)])
def test_a_manifest_with_a_wrong_value_names_the_key(tmp_path, key, value):
    write_folder(tmp_path, numbered_rows(2))
    tree = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**tree, key: value}))
    with pytest.raises(UserError, match=rf"manifest\.json: damaged \({key}"):
        read_manifest(tmp_path)


def test_a_shard_that_is_missing_or_cut_short_and_another_tokenizer_are_named_before_training(tmp_path):
    folder = tmp_path / FINGERPRINT
    write_folder(folder, numbered_rows(8), rows_per_shard=4)

    def check_that_it_is_named(file: str) -> None:
        with pytest.raises(DamagedDataError, match=rf"^{folder / file}: damaged .* remove {folder} and prepare"):
            check_files(folder, read_manifest(folder))

    for file in ("corpus-train-00001.arrow", TOKENIZER):
        whole = (folder / file).read_bytes()
        for changed in (whole[:-1], b"", whole + b"\n"):
            (folder / file).write_bytes(changed)
            check_that_it_is_named(file)
        (folder / file).unlink()
        check_that_it_is_named(file)
        (folder / file).write_bytes(whole)
    check_files(folder, read_manifest(folder))


def test_a_shard_that_changes_its_length_after_that_is_named_when_its_first_row_is_read(tmp_path):
    folder = tmp_path / FINGERPRINT
    write_folder(folder, numbered_rows(8), rows_per_shard=4)
    path = folder / "corpus-train-00001.arrow"
    for changed in (path.read_bytes()[:-1], path.read_bytes() + b"\n", None):
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        rows = Rows(folder, "train")
        assert rows.read(np.arange(4)).tolist() == [[number] * 5 for number in range(4)]
        with pytest.raises(DamagedDataError, match=rf"^{path}: damaged .* remove {folder} and prepare"):
            rows.read(np.array([4]))


def test_a_flipped_byte_is_named_when_its_row_is_read(tmp_path):
    write_folder(tmp_path, numbered_rows(4))
    path = tmp_path / "corpus-train-00000.arrow"
    whole = path.read_bytes()
    expected = Rows(tmp_path, "train").read(np.arange(4)).tolist()
    chance = random.Random(1)
    caught = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        found = rows_or_complaint(tmp_path)
        if isinstance(found, str):
            assert found.startswith(f"{path}: damaged")
            caught += 1
        else:
            assert found == expected  # it hit what rows do not depend on
    assert caught >= 4 * 5 * 2


def rows_or_complaint(folder: Path) -> list[list[int]] | str:
    try:
        return Rows(folder, "train").read(np.arange(4)).tolist()
    except UserError as error:
        return str(error)


def test_another_corpus_in_the_place_of_a_shard_is_named(tmp_path):
    write_folder(tmp_path / "a", numbered_rows(4))
    write_folder(tmp_path / "b", numbered_rows(4, row_length=5), rows_per_shard=2)
    shard = "corpus-train-00000.arrow"
    (tmp_path / "a" / shard).write_bytes((tmp_path / "b" / shard).read_bytes())
    with pytest.raises(UserError, match=rf"{shard}: damaged"):
        Rows(tmp_path / "a", "train").read(np.arange(4))


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    def fill(text: str, *, fail: bool = False) -> None:
        with atomic_folder(tmp_path / "below" / "folder") as partial:
            (partial / "file").write_text(text)
            assert not (tmp_path / "below" / "folder" / "file").exists() or text == "second"
            if fail:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill("broken", fail=True)
    assert list((tmp_path / "below").iterdir()) == []
    fill("first")
    fill("second")  # whoever is first has written the same
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["folder"]
    assert (tmp_path / "below" / "folder" / "file").read_text() == "first"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    atomic_write(tmp_path / "file", b"one")
    with pytest.raises(TypeError):
        atomic_write(tmp_path / "file", "not bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"one"


def test_a_folder_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    there = rf"^{tmp_path}/file/.*: can't make this folder"
    with pytest.raises(UserError, match=there), atomic_folder(tmp_path / "file" / "folder"):
        pass
