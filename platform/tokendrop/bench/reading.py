"""Reading token shards: shuffled and in order, from any place, and beside a consumer that takes its time."""

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build
from tokendrop.data.prepare.writer import ShardWriter
from tokendrop.data.read.batches import MicroBatches
from tokendrop.data.shards.format import FORMAT, TOKENIZER, Header
from tokendrop.launch.stream import RankSamples, StreamedSamples
from tokendrop.models.batch import Batch
from tokendrop.schedule.batch import BatchSplit
from tokendrop.train.task import TaskData

MICRO_BATCH = 8
_VOCABULARY = 50257
_DOCUMENTS_PER_BLOCK = 512
_WINDOW = 8192  # rows that are shuffled together: two shards, so that more are read as it goes on
_FARTHEST, _MOST_WORKERS, _MOST_ACCUMULATED = 10**12, 1024, 8

Epoch = Callable[[], Iterator[Tensor]]
"""Begins an epoch: micro batches (MICRO_BATCH, row_length) of int64, every row once."""


@dataclass(frozen=True, slots=True)
class TokenFolder:
    """Token shards of random tokens."""

    folder: Path
    rows: int
    config: ExperimentConfig
    """A job that reads them once."""

    def open(self) -> TaskData:
        """The rows as a run trains on them."""
        return self.config.task.build(self.config).open(self.folder)


def write_random_rows(folder: Path, *, rows: int, sequence_length: int) -> TokenFolder:
    """Write a corpus in which each row is a document, by the writer that preparation uses."""
    config = _job(rows, sequence_length)
    folder.mkdir()
    (folder / TOKENIZER).write_text("{}")
    header = Header(
        format=FORMAT,
        kind="text",
        sequence_length=sequence_length,
        row_length=sequence_length + 1,
        vocab_size=_VOCABULARY,
        tokenizer_sha256=hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest(),
        sources=("corpus",),
        files=("random",),
    )
    header.write(folder)
    writer = ShardWriter(folder, config.data, file_sources=header.sources)
    generator = np.random.default_rng(0)
    for first in range(0, rows, _DOCUMENTS_PER_BLOCK):
        count = min(_DOCUMENTS_PER_BLOCK, rows - first)
        tokens = generator.integers(0, _VOCABULARY, (count, header.row_length), np.uint16)
        writer.add(_block(tokens, first))
    writer.finish()
    return TokenFolder(folder, rows, config)


def _job(rows: int, sequence_length: int) -> ExperimentConfig:
    sizes = {"layers": 1, "width": 1, "heads": 1, "sequence_length": sequence_length, "vocab_size": _VOCABULARY}
    batch = {"global_batch": MICRO_BATCH, "micro_batch": MICRO_BATCH, "peak_lr": 1}
    tree = {
        "name": "bench-data",
        "model": {"kind": "gpt", **sizes},
        "data": {"corpus": ["random"], "shuffle_rows": _WINDOW},
        "train": {"length": f"{max(1, rows // MICRO_BATCH)} steps", **batch},
    }
    return build(ExperimentConfig, tree, "")


def _block(tokens_DT: np.ndarray, first: int) -> pa.Table:
    count, length = tokens_DT.shape
    offsets = pa.array(np.arange(count + 1) * length, pa.int32())
    return pa.table(
        {
            "tokens": pa.ListArray.from_arrays(offsets, pa.array(tokens_DT.reshape(-1))),
            "sentences": pa.array([[]] * count, pa.list_(pa.int64())),
            "split": pa.array([0] * count, pa.int8()),
            "bytes": pa.array([0] * count, pa.int64()),
            "subset": [""] * count,
            "reason": [""] * count,
            "file": pa.array([0] * count, pa.int32()),
            "record": pa.array(range(first + 1, first + count + 1), pa.int64()),
        }
    )


def our_epochs(folder: TokenFolder) -> dict[str, Epoch]:
    """Rows in their order, and as a run trains on them."""
    samples: Any = folder.open().samples
    places = [np.arange(first, first + MICRO_BATCH) for first in range(0, folder.rows, MICRO_BATCH)]
    return {
        "sequential": lambda: (torch.from_numpy(samples.rows.read(ids)) for ids in places),
        "shuffled": lambda: (torch.from_numpy(samples.at(positions)[1]) for positions in places),
    }


def streamed_epoch(folder: TokenFolder) -> dict[str, Epoch]:
    """The shuffled rows as `data.reader: ray_data` brings them to a worker."""
    samples = RankSamples(
        folder=folder.folder,
        config=folder.config,
        split=BatchSplit(global_batch=MICRO_BATCH, micro_batch=MICRO_BATCH, world_size=1),
        rank=0,
    )

    def read() -> Iterator[Tensor]:
        stream = StreamedSamples(samples)
        for first in range(0, folder.rows // MICRO_BATCH * MICRO_BATCH, MICRO_BATCH):
            yield torch.from_numpy(stream.at(np.arange(first, first + MICRO_BATCH))[1])

    return {"streamed": read}


def speed(epoch: Epoch, seconds: float) -> float:
    """Tokens per second over whole epochs, the beginning of each included; a slow one is cut short."""
    tokens, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        for batch in epoch():
            tokens += batch.numel()
            if (elapsed := time.perf_counter() - started) > 2 * seconds:
                break
    return tokens / elapsed


@contextmanager
def on_one_core() -> Iterator[None]:
    """While its block runs, all threads of this process have one core, where the system can bind them to one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    _bind({min(cores)})
    try:
        yield
    finally:
        _bind(cores)


def _bind(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def seek_times(folder: TokenFolder, tries: int) -> tuple[list[float], list[float]]:
    """Seconds to open a reader, and to its first micro batch at a random position, world size and rank."""
    draw = random.Random(0)
    # beyond so many epochs sample ids run out of bits
    farthest = min(_FARTHEST, folder.rows << 26)
    opened: list[float] = []
    sought: list[float] = []
    for _ in range(tries):
        workers = draw.randint(1, _MOST_WORKERS)
        size = MICRO_BATCH * workers * draw.randint(1, _MOST_ACCUMULATED)
        split = BatchSplit(global_batch=size, micro_batch=MICRO_BATCH, world_size=workers)
        step, rank = draw.randrange(farthest // size), draw.randrange(workers)
        started = time.perf_counter()
        data = folder.open()
        _ = data.samples
        opened.append(time.perf_counter() - started)
        batches = _batches(folder, data, split, rank)
        started = time.perf_counter()
        next(batches.of_step(step))
        sought.append(time.perf_counter() - started)
    return opened, sought


def wait_fraction(folder: TokenFolder, *, tokens_per_s: float, seconds: float, after_s: float = 0.0) -> float:
    """The share of its time that a consumer at this speed, asleep while it computes, waits for micro batches.

    Args:
        after_s: what it reads before is not counted.
    """
    split = BatchSplit(global_batch=MICRO_BATCH, micro_batch=MICRO_BATCH, world_size=1)
    batches = _batches(folder, folder.open(), split, rank=0)
    tokens, waited, step, started = folder.config.model.sequence_length, 0.0, 0, time.perf_counter() + after_s
    while (asked := time.perf_counter()) < started + seconds:
        batch = next(batches.of_step(step))
        waited += time.perf_counter() - asked if asked > started else 0.0
        time.sleep(len(batch.sample_ids_B) * tokens / tokens_per_s)
        step += 1
    return waited / (time.perf_counter() - started)


def _batches(folder: TokenFolder, data: TaskData, split: BatchSplit, rank: int) -> MicroBatches[Batch]:
    nothing = np.zeros(1, np.int64), np.zeros((1, folder.config.model.sequence_length + 1), np.int64)
    return MicroBatches(data.batch, train=data.samples, validation=nothing, split=split, rank=rank)
