"""Corpus to token shards on Ray: exact, in order, whatever the blocks and the cores."""

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from corpora import byte_tokenizer, documents, json_lines, tiny_job, write_corpus
from folders import bytes_of
from preparing import ROW, prepared, sides
from tokendrop.config.load import load_job
from tokendrop.data.corpus.records import RecordForm
from tokendrop.data.corpus.sources import list_files
from tokendrop.data.prepare import pipeline, stages
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.prepare.stages import Work
from tokendrop.data.shards.format import MANIFEST, REJECTED, SPLITS
from tokendrop.data.shards.manifest import read_counts, read_manifest, sum_by_subset
from tokendrop.errors import UserError
from tokendrop.launch.cluster import source_path

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def pile_head(real_data) -> list[str]:
    """The first 300 documents of a sample that is laid out as the Pile is."""
    with pa.CompressedInputStream(str(real_data / "pile_like" / "redpajama_sample.jsonl.zst"), "zstd") as stream:
        lines = io.BufferedReader(stream)
        return [json.loads(next(lines))["text"] for _ in range(300)]


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Take cores away from the rest of the cluster."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 1}] * count)
    ray.get(group.ready())
    yield
    remove_placement_group(group)


def test_rows_are_the_documents_of_a_pile_sample_in_order_by_their_tokenizer(tmp_path, real_data, pile_head):
    tokenizer = real_data / "gpt2_bpe" / "tokenizer.json"
    told: list[tuple[int, int]] = []
    corpus = write_corpus(tmp_path / "pile.jsonl.zst", pile_head, parts=3)
    folder = prepared(tmp_path, [corpus], tokenizer, progress=lambda *seen: told.append(seen))

    found = sides(folder, pile_head, tokenizer)

    assert 10 < found.count("validation") < 60  # a tenth of 300
    header = read_manifest(folder).header
    assert header.documents == 300
    assert header.vocab_size == 50257
    assert told == sorted(told)
    assert told[-1][0] == 300


def test_shards_are_the_same_bytes_whatever_the_blocks_the_files_and_the_cores(
    tmp_path, real_data, pile_head, monkeypatch
):
    tokenizer = real_data / "gpt2_bpe" / "tokenizer.json"
    parts = [write_corpus(tmp_path / f"parts/{n:02}.jsonl.zst", pile_head[n * 25 : n * 25 + 25]) for n in range(12)]
    expected = bytes_of(prepared(tmp_path / "a", [*parts], tokenizer, rows_per_shard=700))
    assert len(expected) > 4

    with busy_cores(3):
        assert bytes_of(prepared(tmp_path / "b", [*parts], tokenizer, rows_per_shard=700)) == expected
    for characters, most in ((5_000, 4096), (10**9, 7), (10**9, 10**9)):
        monkeypatch.setattr(stages, "_BLOCK_CHARACTERS", characters)
        monkeypatch.setattr(stages, "_BLOCK_DOCUMENTS", most)
        folder = tmp_path / f"{characters}-{most}"
        assert bytes_of(prepared(folder, [*parts], tokenizer, rows_per_shard=700)) == expected


def test_a_corpus_without_text_to_learn_a_tokenizer_from_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "_READ_IN_VAIN", 50)
    read, records = list[int](), pipeline.read_records

    def counted(*given):
        for record in records(*given):
            read.append(record.number)
            yield record

    monkeypatch.setattr(pipeline, "read_records", counted)
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(300))
    config = load_job(tiny_job(tmp_path, [corpus], data={"text_key": "content", "tokenizer": None}))
    with pytest.raises(UserError, match=rf"^data\.corpus: of the first 50 documents none can be read; {corpus}:1: "):
        prepare(config)
    assert len(read) == 50


def test_no_block_holds_more_than_it_may_however_long_the_corpus(tmp_path):
    texts = [*documents(500, words=3), "long " * 1000, *[""] * 200]
    (file,) = list_files((str(write_corpus(tmp_path / "corpus.jsonl", texts)),), cache=tmp_path)
    form = RecordForm(text_key="text", subset_key="", only=frozenset(), max_document_bytes=2**20)
    blocks = [
        block.column("text").to_pylist()
        for block in stages._read({"item": [0]}, work=[Work(0, file, form, 0)], block=(1000, 30))
    ]
    assert [text for block in blocks for text in block] == [*texts, ""]  # the line that tells of the file's end
    assert max(map(len, blocks)) <= 30
    assert all(sum(map(len, block[:-1])) < 1000 for block in blocks)


def test_many_small_files_and_empty_ones_are_one_corpus(tmp_path):
    texts = documents(200, words=6)
    for number in range(150):
        write_corpus(tmp_path / f"corpus/{number:03}.jsonl", texts[number : number + 1] if number % 5 else [])
    kept = [texts[number] for number in range(150) if number % 5]
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    folder = prepared(tmp_path, [tmp_path / "corpus"], tokenizer)
    assert "validation" in sides(folder, kept, tokenizer)
    assert read_manifest(folder).header.documents == len(kept)


def test_a_document_is_on_one_side_however_often_it_comes(tmp_path):
    texts = documents(150)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    first, second = (write_corpus(tmp_path / name, texts) for name in ("a.jsonl", "b.parquet"))
    found = sides(prepared(tmp_path, [first, second], tokenizer), texts * 2, tokenizer)
    whole = min(found.index(None) if None in found else 300, 300)
    assert all(found[n] == found[n - 150] for n in range(150, whole))
    assert {"train", "validation"} <= set(found)


def test_a_larger_share_holds_out_the_same_documents_and_more(tmp_path):
    texts = documents(400, words=12)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    held_out = []
    for share in (0.1, 0.4):
        found = sides(prepared(tmp_path / str(share), [corpus], tokenizer, validation_share=share), texts, tokenizer)
        held_out.append({text for text, side in zip(texts, found, strict=True) if side == "validation"})
    assert held_out[0] < held_out[1]
    assert 15 < len(held_out[0]) < 70
    assert 120 < len(held_out[1]) < 200


def test_a_corpus_is_prepared_once_and_anew_when_it_or_its_settings_change(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(100))
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    first = prepared(tmp_path, [corpus], tokenizer)
    before = bytes_of(first)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "tokenized", None)
        assert prepared(tmp_path, [corpus], tokenizer) == first
        assert prepared(tmp_path, [corpus], tokenizer, tokenizer_vocab_size=400) == first
    changed = {
        prepared(tmp_path, [corpus], tokenizer, validation_share=0.3),
        prepared(tmp_path, [corpus]),
        prepared(tmp_path, [write_corpus(corpus, documents(101))], tokenizer),
    }
    assert len(changed) == 3
    assert first not in changed
    assert bytes_of(first) == before
    assert not list(tmp_path.rglob("*.partial*"))


def test_a_damaged_folder_is_named_before_training(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(100))
    folder = prepared(tmp_path, [corpus], byte_tokenizer(tmp_path / "tokenizer.json"))
    (folder / "corpus-validation-00000.arrow").write_bytes(b"")
    with pytest.raises(UserError, match=r"validation-00000\.arrow: damaged"):
        prepared(tmp_path, [corpus], tmp_path / "tokenizer.json")


def test_preparation_that_was_interrupted_goes_on_where_it_was(tmp_path):
    class InterruptedError(Exception):
        pass

    corpus = [write_corpus(tmp_path / f"corpus/{n}.jsonl.zst", documents(60, seed=n)) for n in range(4)]
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    expected = bytes_of(prepared(tmp_path / "whole", [*corpus], tokenizer, rows_per_shard=32))
    read: list[list[int]] = []
    for stop_at in (1, 2, 10**6):
        seen: list[int] = []

        def stop(documents: int, tokens: int, seen: list[int] = seen, stop_at: int = stop_at) -> None:
            seen.append(documents)
            if len(seen) == stop_at:
                raise InterruptedError

        with suppress(InterruptedError):
            folder = prepared(tmp_path / "parts", [*corpus], tokenizer, rows_per_shard=32, progress=stop)
        read.append(seen)
    assert bytes_of(folder) == expected
    assert read[2][0] > read[0][0]  # it began after what was there


def test_two_processes_that_prepare_the_same_make_it_once(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(100))
    config = load_job(
        tiny_job(tmp_path, [corpus], data={"tokenizer": str(byte_tokenizer(tmp_path / "tokenizer.json"))})
    )
    written = []
    write = pipeline._write
    monkeypatch.setattr(pipeline, "_write", lambda *given: written.append(given) or write(*given))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(prepare(config))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert found[0] == found[1]
    assert read_manifest(found[0]).header.is_complete


def test_a_mixture_keeps_its_sources_apart_and_counts_their_sets(tmp_path, real_data):
    pile = real_data / "pile_like" / "redpajama_sample.jsonl.zst"
    sources = [
        {"name": "wiki", "corpus": [str(pile)], "only": ["Wikipedia (en)"], "weight": 3},
        {"name": "code", "corpus": [str(pile)], "only": ["Github", "StackExchange"], "weight": 1},
    ]
    job = tiny_job(tmp_path, [], data={"sources": sources, "corpus": [], "test_share": 0.1})
    manifest = read_counts(prepare(load_job(job)))
    assert manifest.header.sources == ("wiki", "code")
    assert [one.subset for one in manifest.header.subsets] == ["Github", "StackExchange", "Wikipedia (en)"]
    for source, subsets in (("wiki", {"Wikipedia (en)"}), ("code", {"Github", "StackExchange"})):
        assert {one.subset for split in SPLITS for one in sum_by_subset(manifest.stream(source, split))} == subsets
    assert (
        sum(one.tokens for one in manifest.header.subsets) == manifest.header.tokens == sum(manifest.header.rows) * ROW
    )


def test_a_corpus_in_an_object_store_gives_the_bytes_of_the_local_one(tmp_path):
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    local = [write_corpus(tmp_path / f"corpus/{n}.jsonl.zst", documents(50, seed=n), parts=2) for n in range(3)]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        query = f"?endpoint_override={host}%3A{port}&scheme=http&allow_bucket_creation=true"
        store, _ = pafs.FileSystem.from_uri(f"s3://key:secret@pile{query}")
        store.create_dir("pile")
        for path in local:
            with store.open_output_stream(f"pile/train/{path.name}", compression=None) as out:
                out.write(path.read_bytes())
        far = prepared(tmp_path / "a", [f"s3://key:secret@pile/train/*.jsonl.zst{query}"], tokenizer)
    finally:
        server.stop()
    here = bytes_of(prepared(tmp_path / "b", [*local], tokenizer))
    far_away = bytes_of(far)
    assert here.pop(MANIFEST) != far_away.pop(MANIFEST)  # it names the files
    assert far_away == here


def test_a_bad_line_is_recorded_and_stops_nothing_where_it_may_be(tmp_path):
    for number in range(150):
        write_corpus(tmp_path / f"corpus/{number:03}.jsonl", documents(2, seed=number))
    (tmp_path / "corpus/101.jsonl").write_bytes(json_lines(documents(2)) + b"not json\n" + json_lines(["more"]))
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"1 of 302 documents .*; the first: .*corpus/101\.jsonl:3: not valid JSON"):
        prepared(tmp_path, [tmp_path / "corpus"], tokenizer)
    folder = prepared(tmp_path, [tmp_path / "corpus"], tokenizer, max_rejected=0.01)
    (line,) = pq.read_table(folder / REJECTED).to_pylist()
    assert (line["file"], line["line"]) == (str(tmp_path / "corpus/101.jsonl"), 3)
    assert read_manifest(folder).header.rejected == 1


def test_the_corpus_that_comes_with_python_is_written_once_and_can_be_prepared(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    folder = prepared(tmp_path, ["python"], tokenizer)
    assert sum(one.bytes for one in read_manifest(folder).header.subsets) > 2_000_000
    (source,) = (tmp_path / "runs" / "data").glob("python-*")
    before = {path.name: path.stat().st_mtime_ns for path in source.iterdir()}
    assert len(before) == 4
    assert prepared(tmp_path, ["python"], tokenizer) == folder
    assert {path.name: path.stat().st_mtime_ns for path in source.iterdir()} == before


def test_ray_says_nothing_on_the_console(tmp_path):
    import ray

    job = tiny_job(tmp_path, [write_corpus(tmp_path / "corpus.jsonl", documents(60))])
    command = [sys.executable, "-m", "tokendrop", "prepare", job, "--json"]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": source_path()}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["folder"].startswith(str(tmp_path))
    said = [line for line in ended.stderr.splitlines() if "(raylet)" not in line]  # the cluster's own, of other tests
    assert said
    assert all(line.startswith(("connect  ", "prepare  ")) for line in said), ended.stderr
