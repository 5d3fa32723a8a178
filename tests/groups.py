"""Runs of several workers: plain processes in a gloo group of their own, without Ray."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tiny import Rows
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import DamagedDataError
from tokendrop.models.batch import Batch
from tokendrop.track.journal import Journal
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS
from tokendrop.train.loop import TrainComponents, train
from tokendrop.train.trace import tracing
from tokendrop.train.warm_up import warm_up
from tokendrop.train.worker import build_engine

# the processes are forks of one that has imported what takes long
_HEAVY = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "pyarrow.parquet"]
_HEAVY += ["deepspeed.runtime.zero.muon.muon_optimizer"]  # with it comes what deepspeed.initialize imports
mp.get_context("forkserver").set_forkserver_preload(_HEAVY)


def together(world_size: int, function: Callable[..., Any], *arguments: Any, start_method: str = "forkserver") -> None:
    """Call a function, of this or another importable file, in every process of a group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _member, (world_size, f"file://{folder}/store", function, arguments), world_size, start_method=start_method
        )


def apart(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a process of its own, which starts many groups at little cost each: with `"fork"`.

    It has imported what they need, once for all of them, and must not have trained by itself.
    """
    mp.start_processes(_alone, (function, arguments), start_method="forkserver")


def _alone(rank: int, function: Callable[..., Any], arguments: Any) -> None:
    function(*arguments)


def _member(rank: int, world_size: int, store: str, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=limit)
    function(*arguments)
    dist.destroy_process_group()


class RowsUntil(Rows):
    """Rows that end before a step."""

    def __init__(self, config: ExperimentConfig, *, stop: int, world_size: int, rank: int) -> None:
        super().__init__(config, world_size=world_size, rank=rank)
        self.stop = stop

    def of_step(self, step: int) -> Iterator[Batch]:
        if step == self.stop:
            raise StopRunError
        return super().of_step(step)


class StopRunError(Exception):
    """The run has come as far as it should."""


def train_until(
    config: ExperimentConfig,
    run: Path,
    stop: int,
    dtype: torch.dtype | None = None,
    *,
    keep: int = 9,
    warms: bool = False,
) -> None:
    """What a worker does: from the last checkpoint of a run to a step.

    Args:
        dtype: of autocast, whether or not this machine has instructions for it.
        warms: whether each shape is run once before the first step; after that, to compile is an error.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine, dropping = build_engine(config, torch.device("cpu"))
    if dtype is not None:
        engine.dtype = dtype
    run.mkdir(exist_ok=True)
    scores = config.drop.scores(config.model.vocab_size)
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=keep, meta={"strategy": config.train.strategy}, scores=scores)
    newest = checkpoints.newest()
    start = checkpoints.load(engine, newest) if newest else 0
    parts = TrainComponents(
        engine=engine,
        dropping=dropping,
        batches=RowsUntil(config, stop=stop, world_size=world_size, rank=rank),
        checkpoints=checkpoints,
        recorder=Journal(run, rank=rank, world_size=world_size, group=config.train.group, start=start),
        world_size=world_size,
        scores=scores,
    )
    if warms:
        warm_up(config, parts, start=start)
    traced = config.train.profile if rank == 0 else None
    stance = torch.compiler.set_stance("fail_on_recompile") if warms else nullcontext()
    with stance, tracing(traced, run, engine) as trace, suppress(StopRunError):
        train(config, replace(parts, trace=trace), start=start)
    checkpoints.wait()


def go_by(newest: str | None, views: list[Path]) -> None:
    """Asserts that each rank, by its own view of the checkpoints, would go on from `newest`; None: none is whole."""
    checkpoints = Checkpoints(views[dist.get_rank()], keep=9, meta={})
    try:
        found = checkpoints.newest()
    except DamagedDataError:
        assert newest is None
    else:
        assert found is not None
        assert found.name == newest
