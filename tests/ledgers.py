"""Runs of which the ledger alone is real."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import dump_job
from tokendrop.data.read.order import SampleOrder
from tokendrop.data.read.row_reader import sample_order
from tokendrop.data.shards.format import FORMAT, Header, Place, Shard, append_shard
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.track.journal import LEDGER, LEDGER_SCHEMA, Journal
from tokendrop.track.run_folder import DATA, JOB
from tokendrop.train.checkpoint_index import CHECKPOINTS, write_meta
from tokendrop.train.report import StepReport
from tokendrop.train.sealed import seal_text

STEPS, SAVE_EVERY, BATCH = 12, 3, 8
WORLD_SIZES = [1, 2, 4]


@dataclass(frozen=True)
class Run:
    """A run folder whose ledger is written by the real journal; nothing else is trained."""

    folder: Path
    config: ExperimentConfig

    @property
    def order(self) -> SampleOrder:
        return sample_order(self.config.data, seed=self.config.seed)

    def ids_of(self, step: int) -> list[int]:
        committed = read_manifest(self.folder / "data").committed("train")
        return self.order.sample_ids(np.arange((step - 1) * BATCH, step * BATCH), committed).tolist()

    def attempt(
        self,
        world_size: int,
        *,
        start: int,
        end: int = STEPS,
        written: int = 4,
        saved: bool = True,
        gathers: bool = False,
    ) -> int:
        """Workers that record and commit up to `end`, as in `record_attempt`; the step of the last checkpoint."""
        split = replace(self.config.plan.batch, world_size=world_size)
        size = split.micro_batch

        def shares(step: int) -> list[list[int]]:
            ids = self.ids_of(step)
            of_ranks = (split.micro_batches(rank) for rank in range(world_size))
            return [[one for n in numbers for one in ids[n * size : (n + 1) * size]] for numbers in of_ranks]

        steps = range(start + 1, end + 1)
        done = record_attempt(
            self.folder,
            steps,
            shares,
            lambda step: report(step, world_size),
            world_size,
            written=written,
            saved=saved,
            gathers=gathers,
        )
        for step in done:
            self.checkpoint(step)
        return max(done, default=start)

    def checkpoint(self, step: int) -> None:
        folder = self.folder / CHECKPOINTS / f"step_{step:09}"
        folder.mkdir(parents=True)
        write_meta(folder, {"step": step}, {})


class LostRankError(Exception):
    """A rank has not given what rank 0 waits for."""


def gathering(world_size: int) -> list[Callable[[pa.Table], list[pa.Table]]]:
    """Of each rank, how it gives its ledger to rank 0, which is asked last."""
    given: list[pa.Table] = []

    def give(own: pa.Table) -> list[pa.Table]:
        given.append(own)
        return []

    def take(own: pa.Table) -> list[pa.Table]:
        tables = [own, *given]
        given.clear()
        if len(tables) < world_size:
            raise LostRankError
        return tables

    return [take, *[give] * (world_size - 1)]


def record_attempt(
    folder: Path,
    steps: range,
    shares: Callable[[int], list[list[int]]],
    report_of: Callable[[int], StepReport],
    world_size: int,
    *,
    written: int,
    saved: bool,
    gathers: bool = False,
) -> list[int]:
    """Workers that record and commit as the loop does; the steps of the checkpoints that they committed.

    Args:
        shares: the samples of each rank in a step.
        written: ranks that have written their part of the last commit when they end.
        saved: whether that commit's checkpoint is committed too.
        gathers: whether rank 0 writes the ledger of all, as in runs; else each rank its own.
    """
    ways = gathering(world_size) if gathers else [lambda own: [own]] * world_size
    start = steps.start - 1
    journals = [
        Journal(folder, rank=rank, world_size=world_size, start=start, gather=way) for rank, way in enumerate(ways)
    ]
    done: list[int] = []
    for step in steps:
        for journal, ids in reversed([*zip(journals, shares(step), strict=True)]):  # rank 0 last: others give to it
            journal.record(report_of(step), ids)
        if step % SAVE_EVERY:
            continue
        is_last = step + SAVE_EVERY >= steps.stop
        for journal in reversed(journals[: written if is_last else None]):
            with suppress(LostRankError):
                journal.commit(step)
        if not is_last or (saved and written >= world_size):
            done.append(step)
    return done


def report(step: int, world_size: int) -> StepReport:
    numbers = dict.fromkeys(("loss", "grad_norm", "lr", "flops", "data_time_s", "step_time_s"), 1.0)
    counts = dict.fromkeys(("kept_length", "tokens", "layer_tokens"), 1)
    return StepReport(step=step, world_size=world_size, val_loss=None, **numbers, **counts)


def make_run(folder: Path, *, rows: tuple[int, ...] = (50,), window: int = 16, is_complete: bool = True) -> Run:
    """A run on token shards of which the manifest alone is there."""
    names = tuple(f"source{number}" for number in range(len(rows)))
    sources = [{"name": name, "corpus": ["unused"], "weight": number + 1} for number, name in enumerate(names)]
    config = experiment(
        data={"sources": sources, "shuffle_rows": window}, train__length=f"{STEPS} steps", train__micro_batch=2
    )
    data = folder / "data"
    data.mkdir(parents=True)
    header = Header(
        format=FORMAT,
        kind="text",
        sequence_length=16,
        row_length=17,
        vocab_size=50,
        tokenizer_sha256="",
        sources=names,
        files=(),
        is_complete=is_complete,
        rows=(sum(rows), 0, 0) if is_complete else (),
    )
    header.write(data)
    for name, count in zip(names, rows, strict=True):
        next_place = Place(file=0, record=1, token=0, seen=0)
        append_shard(
            data,
            Shard(
                source=name,
                split="train",
                file=f"{name}-train-00000.arrow",
                rows=count,
                bytes=1,
                sha256="",
                subsets=(),
                next=next_place,
            ),
        )
    (folder / JOB).write_text(seal_text(dump_job(config)))
    (folder / DATA).write_text(seal_text(f"{data}\n"))
    return Run(folder, config)


Line = dict[str, int | list[int]]


def with_ledger(run: Run, folder: Path, change: Callable[[list[list[Line]]], None]) -> Run:
    """A copy of a run whose ledger's parts, lists of lines, were changed."""
    shutil.copytree(run.folder, folder)
    parts = sorted((folder / LEDGER).iterdir())
    tables = [pq.read_table(part).to_pylist() for part in parts]
    change(tables)
    for part, lines in zip(parts, tables, strict=True):
        pq.write_table(LEDGER_SCHEMA.empty_table().from_pylist(lines, LEDGER_SCHEMA), part)
    return replace(run, folder=folder)


def lists_of(tables: list[list[Line]], step: int) -> list[list[int]]:
    """The samples of each rank in a step."""
    return [line["sample_ids"] for lines in tables for line in lines if line["step"] == step]


def take(tables: list[list[Line]], place: tuple[int, int]) -> tuple[list[int], int]:
    """Where a sample is: the list and the number there."""
    step, number = place
    for ids in lists_of(tables, step):
        if number < len(ids):
            return ids, number
        number -= len(ids)
    raise AssertionError
