"""Token shards: what was packed is what is read, and damage is named."""

import json
import random
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.data.commit import appearing
from tokendrop.data.shards import MANIFEST, Manifest, Rows, read_manifest, write_shard
from tokendrop.errors import UserError


def write_folder(folder: Path, shards: list[np.ndarray], *, vocab_size: int = 2**16) -> Manifest:
    manifest = Manifest(
        sequence_length=shards[0].shape[1] - 1,
        vocab_size=vocab_size,
        tokenizer_sha256="",
        documents=1,
        characters=1,
        tokens=1,
        train=tuple(write_shard(folder / f"{n}.arrow", rows_NT) for n, rows_NT in enumerate(shards)),
        validation=(),
    )
    manifest.write(folder)
    return manifest


def numbered(rows: int, length: int = 5, *, dtype: type = np.uint16) -> np.ndarray:
    return np.arange(rows * length).reshape(rows, length).astype(dtype)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    length=st.integers(2, 9),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    data=st.data(),
)
def test_rows_read_are_the_rows_written_in_any_order(sizes, length, dtype, data):
    every = numbered(sum(sizes), length, dtype=dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, np.split(every, np.cumsum(sizes)[:-1]))
        rows = Rows(folder, read_manifest(folder), "train")
        wanted = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=12))
        found = rows.read(np.array(wanted, dtype=np.int64))
    assert len(rows) == len(every)
    assert found.dtype == np.int64
    assert np.array_equal(found, every[wanted])


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    written = write_folder(tmp_path, [numbered(3), numbered(2)])
    assert read_manifest(tmp_path) == written


def test_many_shards_hold_no_files_open(tmp_path):
    write_folder(tmp_path, [numbered(1)] * 60)
    before = len(list(Path("/proc/self/fd").iterdir()))
    rows = Rows(tmp_path, read_manifest(tmp_path), "train")
    rows.read(np.arange(60))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"train": 3}',
        "\x00",
        "[" * 100_000,
    ],
    ids=lambda text: repr(text)[:14],
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=rf"^{tmp_path}/manifest\.json: damaged .* remove {tmp_path} and prepare"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("sequence_length", "long"), ("train", [3]), ("train", [{"file": "0.arrow"}]), ("vocab_size", None)],
)
def test_a_manifest_with_a_wrong_value_names_the_key(tmp_path, key, value):
    write_folder(tmp_path, [numbered(2)])
    tree = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**tree, key: value}))
    with pytest.raises(UserError, match=rf"manifest\.json: damaged \({key}"):
        read_manifest(tmp_path)


def test_a_shard_that_is_missing_cut_short_or_of_another_corpus_is_named(tmp_path):
    manifest = write_folder(tmp_path, [numbered(4), numbered(3)])
    shard = tmp_path / "1.arrow"
    whole = shard.read_bytes()

    def check_that_it_is_named() -> None:
        with pytest.raises(UserError, match=rf"^{shard}: damaged .* remove {tmp_path} and prepare"):
            Rows(tmp_path, manifest, "train")

    for length in range(0, len(whole), 13):
        shard.write_bytes(whole[:length])
        check_that_it_is_named()
    for rows_NT in (numbered(2), numbered(3, 6)):
        write_shard(shard, rows_NT)
        check_that_it_is_named()
    shard.unlink()
    check_that_it_is_named()


@pytest.mark.parametrize(
    "column",
    [pa.array([1.0, 2.0]), pa.array(["a", "b"]), pa.array([[1, 2, 3, 4, 5]] * 2, pa.list_(pa.int64(), 5))],
)
def test_an_arrow_file_of_something_else_is_named(tmp_path, column):
    manifest = write_folder(tmp_path, [numbered(2)])
    batch = pa.record_batch([column], names=["tokens"])
    with pa.ipc.new_file(str(tmp_path / "0.arrow"), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(UserError, match=r"0\.arrow: damaged"):
        Rows(tmp_path, manifest, "train")


def test_a_token_that_the_tokenizer_does_not_have_is_named_by_shard_and_row(tmp_path):
    manifest = write_folder(tmp_path, [numbered(4), numbered(3)], vocab_size=2**16)
    rows = Rows(tmp_path, replace(manifest, vocab_size=14), "train")
    assert rows.read(np.array([0, 1])).max() == 9
    with pytest.raises(UserError, match=r"0\.arrow: damaged \(.* in row 2\)"):
        rows.read(np.array([0, 2]))


def test_flipped_bytes_give_an_error_or_tokens_of_the_vocabulary(tmp_path):
    manifest = write_folder(tmp_path, [numbered(4)], vocab_size=20)
    whole = (tmp_path / "0.arrow").read_bytes()
    chance = random.Random(1)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 2, 8])):
            damaged[chance.randrange(len(whole))] = chance.randrange(256)
        (tmp_path / "0.arrow").write_bytes(damaged)
        with suppress(UserError):  # anything else would be raised, or would end this process
            assert Rows(tmp_path, manifest, "train").read(np.arange(4)).max() < 20


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    def fill(text: str, *, fail: bool = False) -> None:
        with appearing(tmp_path / "below" / "folder") as partial:
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


def test_a_folder_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    there = rf"^{tmp_path}/file/.*: can't make this folder"
    with pytest.raises(UserError, match=there), appearing(tmp_path / "file" / "folder"):
        pass
