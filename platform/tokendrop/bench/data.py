"""`tokendrop bench data`: reading, seeking, waiting and preparing, beside other libraries and the bare tokenizer."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokendrop.bench.figures import bench_result, figure, interleave, ratios
from tokendrop.bench.peers import PEERS, read_tables
from tokendrop.bench.preparation import peak_memory, repeat_corpus, run
from tokendrop.bench.reading import (
    Epoch,
    on_one_core,
    our_epochs,
    seek_times,
    speed,
    streamed_epoch,
    wait_fraction,
    write_random_rows,
)
from tokendrop.bench.slow_store import SlowStore, behind_slow_link
from tokendrop.launch.cluster import connect

Figures = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    sequence_length: int = 2048
    rows: int = 32_768
    read_s: float = 1.0
    """For which each way to read is run in a round."""
    seeks: int = 300
    consumer_tokens_per_s: float = 450e3
    consumer_s: float = 5.0
    remote_start_s: float = 30.0
    """After which waiting for shards of a store counts."""
    remote_s: float = 30.0
    """For which it does."""
    file_characters: int = 40_000_000
    files: int = 20
    """Of the corpus that is prepared."""
    memory_files: int = 8
    """The peak memory at so many is compared with that at ten times as many."""


def bench_data(job: Path, overrides: list[str], *, rounds: int, log: Say, sizes: Sizes | None = None) -> dict[str, Any]:
    """Prepare the job's corpus, repeated until it is long enough, and read random rows.

    Raises:
        UserError: the job or its corpus is wrong.
    """
    sizes = sizes or Sizes()
    # a shard may still be on its way when all is measured
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        prepared = _preparation(job, overrides, scratch, sizes, rounds=rounds, log=log)
        read = _reading(scratch, sizes, rounds=rounds, log=log)
    command = ["tokendrop bench data", f"--job {job}", *overrides, f"--rounds {rounds}"]
    return bench_result("data", read | prepared, " ".join(command))


def _preparation(job: Path, overrides: list[str], scratch: Path, sizes: Sizes, *, rounds: int, log: Say) -> Figures:
    corpus = repeat_corpus(job, overrides, scratch, characters=sizes.file_characters)
    cases = {what: partial(run, what, corpus.job(sizes.files)) for what in ("prepare", "tokenizer")}
    speeds = interleave(cases, rounds=rounds, log=log)
    once, ten_times = (peak_memory(corpus.job(files)) for files in (sizes.memory_files, 10 * sizes.memory_files))
    log(f"memory   {once:,} bytes at most, {ten_times:,} for ten times the corpus")
    return {
        "prepare_tokens_per_s": figure(speeds["prepare"], "tokens/s"),
        "tokenizer_tokens_per_s": figure(speeds["tokenizer"], "tokens/s"),
        "prepare_over_tokenizer": figure(ratios(speeds["prepare"], speeds["tokenizer"]), "x tokens/s"),
        "peak_memory_bytes": figure([ten_times], "bytes"),
        "memory_10x_over_1x": figure([ten_times / once], "x"),
    }


def _reading(scratch: Path, sizes: Sizes, *, rounds: int, log: Say) -> Figures:
    """In this process, on one core; Ray's own processes have them all."""
    torch.set_num_threads(1)
    folder = write_random_rows(scratch / "rows", rows=sizes.rows, sequence_length=sizes.sequence_length)
    connect()
    epochs = our_epochs(folder) | streamed_epoch(folder) | _peer_epochs(folder.folder, log)
    with on_one_core():
        speeds = interleave(
            {name: partial(speed, epoch, sizes.read_s) for name, epoch in epochs.items()}, rounds=rounds, log=log
        )
        opened, sought = seek_times(folder, sizes.seeks)
        waits = [
            wait_fraction(folder, tokens_per_s=sizes.consumer_tokens_per_s, seconds=sizes.consumer_s)
            for _ in range(rounds)
        ]
        remote = replace(folder, folder=behind_slow_link(folder.folder, scratch / "cache"))
        counted_from = time.monotonic() + sizes.remote_start_s
        remote_waits = wait_fraction(
            remote, tokens_per_s=sizes.consumer_tokens_per_s, seconds=sizes.remote_s, after_s=sizes.remote_start_s
        )
        fetched_later = sum(at > counted_from for at in SlowStore.reads)
    sought_ms = np.array(sought) * 1e3
    return {
        **{f"{name}_tokens_per_s": figure(values, "tokens/s") for name, values in speeds.items()},
        **_over_peers(speeds),
        "streamed_over_mapped": figure(ratios(speeds["streamed"], speeds["shuffled"]), "x tokens/s"),
        "seek_p50_ms": figure([float(np.percentile(sought_ms, 50))], "ms"),
        "seek_p99_ms": figure([float(np.percentile(sought_ms, 99))], "ms"),
        "open_ms": figure([s * 1e3 for s in opened], "ms"),
        "wait_fraction": figure(waits, "of the time"),
        "remote_wait_fraction": figure([remote_waits], "of the time"),
        "remote_shards_meanwhile": figure([fetched_later], "shards"),
    }


def _peer_epochs(shards: Path, log: Say) -> dict[str, Epoch]:
    """Each has read its first micro batch, so that what it loads and starts once is left out."""
    tables = read_tables(shards)
    epochs: dict[str, Epoch] = {}
    for peer in PEERS:
        if peer.is_installed():
            epochs |= peer.epochs(tables)
        else:
            log(f"peer     {peer.name} is not installed, and left out; {peer.install}")
    for epoch in epochs.values():
        next(epoch())
    return epochs


def _over_peers(speeds: Mapping[str, list[float]]) -> Figures:
    """Beside the best of those that shuffle all rows, as we do, and of those that shuffle a buffer of them."""
    names = [peer.name for peer in PEERS if peer.name in speeds]
    return {
        "over_best_peer": figure(ratios(speeds["shuffled"], _best(speeds, names)), "x tokens/s"),
        "over_best_buffer": figure(
            ratios(speeds["shuffled"], _best(speeds, [f"{n}_buffer" for n in names])), "x tokens/s"
        ),
    }


def _best(speeds: Mapping[str, list[float]], names: list[str]) -> list[float]:
    return [max(values) for values in zip(*(speeds[name] for name in names), strict=True)]
