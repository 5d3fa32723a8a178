"""Attempts at a run by one worker, without Ray: it may die, or be asked to stop or to pause."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny import Rows, loss_of
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.method import attach
from tokendrop.models.batch import Batch
from tokendrop.models.build import build_model
from tokendrop.track.journal import Journal, read_steps
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import committed, read_meta
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.loop import TrainComponents, train
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.worker import build_engine


class WorkerLostError(Exception):
    """The worker is gone."""


class RowsUntil(Rows):
    """Rows that end with the worker's death at a step; what it had not committed is lost."""

    def __init__(self, config: ExperimentConfig, dies_at: int | None) -> None:
        super().__init__(config)
        self.dies_at = dies_at

    def of_step(self, step: int) -> Iterator[Batch]:
        for batch in super().of_step(step):
            if step == self.dies_at and batch.numbers == (1,):
                raise WorkerLostError
            yield batch


def lone_worker(config: ExperimentConfig, **others: Any) -> TrainComponents:
    """What one worker trains with, in tests of single steps: it saves and records nothing."""
    engine, dropping = build_engine(config, torch.device("cpu"))
    parts: dict[str, Any] = {
        "engine": engine,
        "dropping": dropping,
        "batches": Rows(config),
        "checkpoints": None,
        "recorder": None,
        "world_size": 1,
        "scores": config.drop.scores(config.model.vocab_size),
    }
    return TrainComponents(**parts | others)


def new_engine(config: ExperimentConfig) -> DdpEngine:
    model = build_model(config.model, seed=config.seed).double()
    return DdpEngine(model, build_optimizers(model, config.train), torch.float64, loss=loss_of)


def attempt(
    config: ExperimentConfig,
    run: Path,
    *,
    dies_at: int | None = None,
    stop: int | None = None,
    pause: int | None = None,
    reads_behind: int = 0,
) -> DdpEngine:
    """What a worker does: build, attach, restore from the last checkpoint, train to the end or to its death.

    Args:
        stop: the step to which it is to train.
        pause: the step before whose end it is asked to pause.
    """
    engine = new_engine(config)
    dropping = attach(engine.model, seed=config.seed)
    checkpoints = Checkpoints(run / "checkpoints", keep=config.checkpoint.keep, meta={"name": config.name})
    newest = checkpoints.newest()
    start = checkpoints.load(engine, newest) if newest else 0
    parts = TrainComponents(
        engine=engine,
        dropping=dropping,
        batches=RowsUntil(config, dies_at),
        checkpoints=checkpoints,
        recorder=Journal(run, rank=0, world_size=1, start=start),
        world_size=1,
        pause=lambda step: step + 1 == pause,
        reads_behind=reads_behind,
    )
    try:
        reached = train(config, parts, start=start, stop=stop)
        assert reached == min(one or config.steps for one in (stop, pause))
        assert read_meta(committed(run / "checkpoints")[-1])["step"] == reached
    finally:
        checkpoints.wait()
    return engine


def state(engine: DdpEngine) -> dict[str, Tensor]:
    """Weights and optimizer state, by name."""
    names = {id(p): name for name, p in engine.model.named_parameters()}
    moments = {
        f"{names[id(p)]}.{key}": value for p, of_p in engine.optimizers[0].state.items() for key, value in of_p.items()
    }
    return dict(engine.model.state_dict()) | moments


def history(run: Path) -> list[dict[str, object]]:
    """The committed steps without what a clock measured."""
    return [{k: v for k, v in row.items() if not k.endswith("time_s")} for row in read_steps(run)]
