"""Damage of any kind, from a fixed seed: what was written, or one sentence; never another row, a crash or a hang."""

import gzip
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import byte_tokenizer, documents, json_lines
from damage import mutated
from folders import Document, write_folder
from records import form, read
from tokendrop.data.corpus.records import read_records
from tokendrop.data.corpus.sources import list_files
from tokendrop.data.read.inspection import count_tokens, find_sample
from tokendrop.data.read.order import ROW_BITS
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.files import map_shard, read_documents
from tokendrop.data.shards.format import MANIFEST, SHARDS, SPLITS, write_shard
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.data.shards.verify import verify
from tokendrop.errors import DamagedDataError, UserError

FIXED = settings(derandomize=True, max_examples=150)

# --- tables of a corpus ---

READ_MANY = """
import random, signal, sys, tempfile
from pathlib import Path
from damage import TEXTS, arrow_files, mutated, parquet_files
from records import read
from tokendrop.errors import UserError

suffix, count = sys.argv[1], int(sys.argv[2])
whole = {".arrow": arrow_files, ".parquet": parquet_files}[suffix]()
path = Path(tempfile.mkdtemp()) / f"corpus{suffix}"
for seed in range(count):
    chance = random.Random(seed)
    path.write_bytes(mutated(chance.choice(whole), chance))
    print(seed, flush=True)
    signal.alarm(10)
    try:
        records = read(path)
    except UserError as error:
        assert "\\n" not in str(error), error
        continue
    assert all("\\n" not in record.reason and record.number > 0 for record in records), records
"""


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_a_damaged_table_never_ends_the_process_that_reads_it(suffix):
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent / "platform")])
    done = subprocess.run(
        [sys.executable, "-c", READ_MANY, suffix, "1000"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout.split()[-1:], done.stderr[-500:])


def test_a_batch_of_more_rows_than_fit_anywhere_is_told_row_by_row(tmp_path):
    path = tmp_path / "corpus.arrow"
    batch = pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.null(), 2**31 - 1, [None])], names=["text"])
    with pa.ipc.new_stream(path, batch.schema) as out:
        out.write_batch(batch)
    (file,) = list_files((str(path),), cache=tmp_path)
    records = read_records(file, form())
    assert next(records).reason == "want text in 'text', got nothing"
    assert next(records).number == 2


LINES = json_lines(documents(12, words=5))
SQUEEZED: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.zst": zstandard.compress,
    ".jsonl.gz": gzip.compress,
    ".txt": bytes,
}


@FIXED
@given(suffix=st.sampled_from([*SQUEEZED]), seed=st.integers(0, 2**32))
def test_damaged_lines_give_the_records_before_the_damage_and_say_what_follows(suffix, seed):
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"corpus{suffix}"
        path.write_bytes(mutated(SQUEEZED[suffix](LINES), chance))
        records = read(path)
    assert [record.number for record in records] == sorted({record.number for record in records})
    assert all("\n" not in record.reason for record in records)


# --- token shards ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "0123456789abcdef"
    texts = [Document([n] * 5, split=SPLITS[n % 7 == 6], subset="ab"[n % 2]) for n in range(1, 60)]
    tokenizer = byte_tokenizer(folder.parent / "bytes.json").read_text()
    write_folder(folder, [("web", texts[:40]), ("books", texts[40:])], rows_per_shard=16, tokenizer=tokenizer)
    return folder


def all_rows(folder: Path) -> dict[tuple[str, int], list[list[int]]]:
    """What training would read, by split and source."""
    found = {}
    for split in ("train", "validation"):
        rows = Rows(folder, split)
        for source, count in enumerate(rows.committed.rows):
            found[split, source] = rows.read((source << ROW_BITS) + np.arange(count)).tolist()
    return found


def damage(content: bytes, kind: str, chance: random.Random) -> bytes:
    if kind == "bytes":
        return mutated(content, chance)
    if kind == "garbage":
        return chance.randbytes(chance.randrange(200))
    lines = content.splitlines(keepends=True)
    place = chance.randrange(max(1, len(lines)))
    if kind == "no line":
        return b"".join(lines[:place] + lines[place + 1 :])
    if kind == "a line twice":
        return b"".join([*lines[: place + 1], *lines[place:]])
    if kind == "lines change places":
        chance.shuffle(lines)
        return b"".join(lines)
    return content[: chance.randrange(len(content))]


KINDS = ["bytes", "bytes", "bytes", "garbage", "cut", "no line", "a line twice", "lines change places"]


@FIXED
@given(name=st.integers(0, 20), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))
def test_damaged_shards_give_the_rows_that_were_written_or_one_sentence(whole, name, kind, seed):
    files = [MANIFEST, SHARDS, *(path.name for path in sorted(whole.iterdir()))]
    expected = all_rows(whole)
    path = whole / files[name % len(files)]
    content = path.read_bytes()
    try:
        path.write_bytes(damage(content, kind, random.Random(seed)))
        for look in (all_rows, verify, count_tokens, lambda folder: find_sample(folder, 3, "train")):
            try:
                found = look(whole)
            except UserError as error:
                said = str(error).splitlines()
                assert len(said) == 1
                continue
            if look is all_rows:
                assert found == {stream: expected[stream][: len(rows)] for stream, rows in found.items()}
    finally:
        path.write_bytes(content)


def test_no_bit_of_a_shard_ends_the_process_or_makes_another_row(tmp_path):
    """Of such bits pyarrow's own reader dies."""
    write_folder(tmp_path, [("a", [Document([7] * 5), Document([8] * 5), Document([9] * 5, split="validation")])])
    (shard,) = read_manifest(tmp_path).of("a", "train")
    path, expected = tmp_path / shard.file, all_rows(tmp_path)
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 5):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedDataError, match="sha256"):
            read_documents(tmp_path, shard, [0])
        try:
            rows_NT, checks_N = map_shard(path, (2, 5))
        except DamagedDataError:
            continue
        assert rows_NT.shape == (2, 5)
        assert checks_N.shape == (2,)
    path.write_bytes(content)
    assert all_rows(tmp_path) == expected


@given(
    rows=st.integers(1, 40),
    length=st.integers(1, 40),
    kind=st.sampled_from([np.uint16, np.uint32]),
    subsets=st.lists(st.text(max_size=5), max_size=5),
)
def test_rows_lie_where_pyarrow_finds_them(rows, length, kind, subsets):
    chance = np.random.default_rng(rows * length)
    rows_NT = chance.integers(0, np.iinfo(kind).max, (rows, length), kind, endpoint=True)
    names = pa.array([[{"subset": name, "n": 1} for name in subsets]] * rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.arrow"
        write_shard(path, rows_NT, names)
        found_NT, checks_N = map_shard(path, (rows, length))
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
    assert found_NT.dtype == kind
    assert found_NT.tolist() == rows_NT.tolist() == table.column("tokens").to_pylist()
    assert checks_N.tolist() == table.column("xxh3_64").to_pylist()
