"""Layers that some workers run on nothing: the same losses and gradients under DDP and FSDP as with one worker."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groups import together, train_until
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.track.journal import read_steps
from tokendrop.train.worker import build_engine

STEPS = 4
KEY = ("loss", "grad_norm", "val_loss", "layer_tokens", "kept_length", "lr")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def job(strategy: str, **changes: Any) -> ExperimentConfig:
    """Each layer runs on 2 of 8 sequences, which come one by one: most of the time it runs on none."""
    return experiment(
        model__layers=3,
        train__strategy=strategy,
        train__micro_batch=1,
        train__warmup="0 steps",
        train__length=f"{STEPS} steps",
        evaluate__every="2 steps",
        checkpoint__every="4 steps",
        drop={"method": "layer_dropout", "keep": 0.25, "by_depth": False},
        **changes,
    )


def runs_of(workers: int, folder: Path) -> None:
    """What each worker of a group does."""
    for strategy in ("ddp", "fsdp") if workers > 1 else ("ddp",):
        train_until(job(strategy), folder / f"{strategy} {workers}", STEPS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layer_dropout")
    for workers in (1, 2, 4):
        together(workers, runs_of, workers, folder)
    return folder


def column(run: Path, key: str) -> np.ndarray:
    return np.array([row[key] for row in read_steps(run) if row[key] is not None])


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_losses_and_gradients_are_those_of_one_worker(runs: Path, strategy: str, workers: int) -> None:
    for key in KEY:
        ours, theirs = (column(runs / name, key) for name in (f"{strategy} {workers}", "ddp 1"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, err_msg=key)


def test_its_weights_are_named_as_those_of_the_plain_model() -> None:
    dropped, _ = build_engine(job("ddp"), torch.device("cpu"))
    plain, _ = build_engine(experiment(model__layers=3, drop={"method": "none"}), torch.device("cpu"))
    assert dropped.model.state_dict().keys() == plain.model.state_dict().keys()
