"""Layers compiled by inductor before the first step train as eager ones do, under DDP and FSDP, dropping or not."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groups import together, train_until
from tiny import TOKENS, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.track.journal import read_steps

COMPILER = "g++"
GRAPHS = "cuda graphs"  # on a CPU these are static ones, with gradients that stay where they are
COMPILED: dict[str, tuple[bool | str, ...]] = {"ddp": (True, "static", GRAPHS), "fsdp": (True,)}
EXACT = 1e-10  # float64; a fused kernel may add up in another order
STEPS = 4

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"inductor needs {COMPILER}, which is not here"),
]


def job(strategy: str, *, compiled: bool | str) -> ExperimentConfig:
    """Two steps with dropped tokens, of two lengths, then two at full length; the first runs larger micro batches."""
    stages = [{"at": f"{step} steps", "kept": kept} for step, kept in enumerate([5, 9, TOKENS])]
    changes: dict[str, Any] = {"train__strategy": strategy, "train__compile": compiled}
    if compiled == GRAPHS:
        changes |= {"train__compile": "static", "train__cuda_graphs": True, "scaling__gpus_per_worker": 1}
    changes |= {"drop__schedule": {"kind": "piecewise", "stages": stages}, "train__length": f"{STEPS} steps"}
    changes |= {"train__micro_batch": 2, "train__tokens_per_micro_batch": 20}
    return experiment(model__layers=3, evaluate__every="2 steps", checkpoint__every="4 steps", **changes)


def both_strategies(folder: Path) -> None:
    """What each worker of the group does."""
    for strategy in COMPILED:
        for compiled in (False, *COMPILED[strategy]):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            warms = bool(compiled)
            train_until(job(strategy, compiled=compiled), folder / f"{strategy} {compiled}", STEPS, warms=warms)
            graphs = torch._dynamo.utils.counters["inductor"]
            assert bool(graphs) == warms, graphs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inductor")
    together(2, both_strategies, folder)
    return folder


def column(run: Path, key: str) -> np.ndarray:
    return np.array([row[key] for row in read_steps(run) if row[key] is not None])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "how"), [(one, how) for one, some in COMPILED.items() for how in some])
def test_losses_and_gradient_norms_are_those_of_the_eager_run(runs: Path, strategy: str, how: bool | str) -> None:
    assert [segment.micro_batch for segment in job(strategy, compiled=how).plan.segments] == [4, 2, 2]
    eager, compiled = runs / f"{strategy} False", runs / f"{strategy} {how}"
    assert list(column(compiled, "kept_length")) == [5, 9, TOKENS, TOKENS]
    for key in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose(column(compiled, key), column(eager, key), rtol=EXACT)
