"""`tokendrop bench data`: what it compares is the same work, and all its figures are there."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from corpora import documents, tiny_job, write_corpus
from tokendrop.bench.data import Sizes, bench_data
from tokendrop.bench.peers import PEERS, read_tables
from tokendrop.bench.reading import (
    MICRO_BATCH,
    on_one_core,
    our_epochs,
    streamed_epoch,
    wait_fraction,
    write_random_rows,
)
from tokendrop.bench.slow_store import BYTES_PER_S, LATENCY_S, behind_slow_link
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError

ROWS, LENGTH = 48, 16
TINY = Sizes(
    sequence_length=LENGTH,
    rows=ROWS,
    read_s=0.001,
    seeks=5,
    consumer_s=0.01,
    remote_start_s=0.1,
    remote_s=0.05,
    file_characters=20_000,
    files=1,
    memory_files=1,
)
FIGURES = {
    "shuffled_tokens_per_s",
    "sequential_tokens_per_s",
    "ray_data_tokens_per_s",
    "over_best_peer",
    "streamed_tokens_per_s",
    "streamed_over_mapped",
    "seek_p50_ms",
    "seek_p99_ms",
    "open_ms",
    "wait_fraction",
    "remote_wait_fraction",
    "prepare_tokens_per_s",
    "tokenizer_tokens_per_s",
    "prepare_over_tokenizer",
    "memory_10x_over_1x",
    "peak_memory_bytes",
}


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_bench_has_all_its_figures(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    said: list[str] = []

    result = bench_data(
        tiny_job(tmp_path, [corpus]), ["data.validation_share=0.2"], rounds=1, log=said.append, sizes=TINY
    )

    figures = result["figures"]
    assert figures.keys() >= FIGURES
    assert figures.pop("remote_shards_meanwhile")["median"] == 0  # one shard, which is there by then
    assert all(0 < one["min"] <= one["median"] <= one["max"] for one in figures.values())
    assert figures["wait_fraction"]["max"] < 1
    assert figures["seek_p50_ms"]["median"] <= figures["seek_p99_ms"]["median"]
    assert figures["peak_memory_bytes"]["median"] > 10**8  # a Ray is no smaller
    left_out = {peer.name for peer in PEERS if not peer.is_installed()}
    assert {name for name in left_out if any(f"{name} is not installed" in line for line in said)} == left_out
    assert "data.validation_share=0.2" in result["command"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_rows_streamed_by_ray_data_are_the_mapped_ones_in_their_order(tmp_path):
    folder = write_random_rows(tmp_path / "rows", rows=ROWS, sequence_length=LENGTH)
    mapped, streamed = our_epochs(folder)["shuffled"], streamed_epoch(folder)["streamed"]
    assert torch.equal(torch.cat(list(streamed())), torch.cat(list(mapped())))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_gives_the_rows_that_we_give(tmp_path, peer):
    if not peer.is_installed():
        pytest.skip(f"{peer.name} is not installed")
    folder = write_random_rows(tmp_path / "rows", rows=ROWS, sequence_length=LENGTH)
    ours = our_epochs(folder)
    expected = torch.cat(list(ours["sequential"]())).tolist()
    assert len(expected) == ROWS
    for name, epoch in {**ours, **peer.epochs(read_tables(folder.folder))}.items():
        batches = list(epoch())
        assert {(tuple(batch.shape), batch.dtype) for batch in batches} == {((MICRO_BATCH, LENGTH + 1), torch.int64)}
        found = torch.cat(batches).tolist()
        assert sorted(found) == sorted(expected)
        assert (found == expected) == ("sequential" in name)


def test_random_rows_are_token_shards_as_preparation_writes_them(tmp_path):
    folder = write_random_rows(tmp_path / "rows", rows=ROWS, sequence_length=LENGTH)
    header = read_manifest(folder.folder).header
    assert (header.is_complete, header.rows, header.documents) == (True, (ROWS, 0, 0), ROWS)
    ids, rows_NT = folder.open().samples.at(np.arange(ROWS))
    assert len(set(ids.tolist())) == ROWS
    assert rows_NT.max() > 2**15  # of a whole vocabulary


def test_a_consumer_faster_than_reading_waits_all_the_time(tmp_path):
    folder = write_random_rows(tmp_path / "rows", rows=ROWS, sequence_length=LENGTH)
    slow, fast = (wait_fraction(folder, tokens_per_s=speed, seconds=0.05) for speed in (1e2, 1e12))
    assert slow < fast <= 1


def test_rows_behind_a_slow_link_are_those_of_the_folder_and_each_request_waits(tmp_path, monkeypatch):
    slept: list[float] = []
    folder = write_random_rows(tmp_path / "rows", rows=ROWS, sequence_length=LENGTH)
    near = torch.cat(list(our_epochs(folder)["shuffled"]()))
    monkeypatch.setattr("tokendrop.bench.slow_store.time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 0.0))
    far = replace(folder, folder=behind_slow_link(folder.folder, tmp_path / "cache"))
    assert torch.equal(torch.cat(list(our_epochs(far)["shuffled"]())), near)
    shards = [path.stat().st_size for path in folder.folder.glob("*.arrow")]
    assert {LATENCY_S + size / BYTES_PER_S for size in shards} <= {*slept}


def test_waiting_at_the_begin_is_not_counted_where_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tokendrop.bench.slow_store.LATENCY_S", 0.3)
    folder = write_random_rows(tmp_path / "rows", rows=ROWS, sequence_length=LENGTH)
    whole, later = (
        wait_fraction(
            replace(folder, folder=behind_slow_link(folder.folder, tmp_path / f"cache-{after_s}")),
            tokens_per_s=1e4,
            seconds=0.1,
            after_s=after_s,
        )
        for after_s in (0.0, 1.5)
    )
    assert later < 0.5 < whole


def test_one_core_is_for_a_block_alone():
    before = os.sched_getaffinity(0)
    with on_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_several_sources_are_no_corpus_to_repeat(tmp_path):
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", documents(5)))
    sources = [{"name": "a", "corpus": [corpus], "weight": 1}]
    job = tiny_job(tmp_path, [], data={"corpus": [], "sources": sources})
    with pytest.raises(UserError, match=r"want data\.corpus, got data\.sources"):
        bench_data(Path(job), [], rounds=1, log=print, sizes=TINY)
