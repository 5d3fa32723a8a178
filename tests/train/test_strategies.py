"""Neither a strategy nor a world size shows in what is trained, and checkpoints go from each to each."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groups import together, train_until
from sharing import HAS_DEEPSPEED, job
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models.build import build_model
from tokendrop.track.journal import read_ledger, read_steps
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.engines.deepspeed import DeepSpeedEngine
from tokendrop.train.reader import load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# by what losses and gradient norms may differ, relatively, and weights after 10 steps of Adam at rates up to 0.01
TOLERANCES = {"fp64": (1e-10, 1e-10), "fp32": (1e-6, 1e-4)}
LEGS = [(1, 2), (2, 4), (4, 6), (2, 8), (1, 10)]  # workers, and the step that they train to


def jobs(*strategies: str, precision: str, **changes: object) -> list[ExperimentConfig]:
    """The job of every leg, by the strategies of the legs in which there is something to share."""
    path = strategies * 3 if len(strategies) == 1 else strategies
    return [job(strategy, precision, **changes) for strategy in ("ddp", *path, "ddp")]


CASES = {
    "ddp": jobs("ddp", precision="fp64"),
    "fsdp": jobs("fsdp", precision="fp64", train__activation_checkpointing=True),
    "zero 1": jobs("zero 1", precision="fp32"),
    "zero 2": jobs("zero 2", precision="fp32"),
    "zero 3": jobs("zero 3", precision="fp32", train__activation_checkpointing=True),
    "another each time": jobs("zero 3", "fsdp", "zero 1", precision="fp32"),
}
IN_BF16 = ["ddp", "fsdp", "zero 1", "zero 3"]


def runs_here(case: str) -> bool:
    return HAS_DEEPSPEED or case in ("ddp", "fsdp")


def skipped_by_name(cases: Iterable[str]) -> list[Any]:
    skip = pytest.mark.skip(reason="deepspeed is not installed: pip install 'tokendrop[deepspeed]'")
    return [pytest.param(case, marks=() if runs_here(case) else skip) for case in cases]


def leg(number: int, folder: Path) -> None:
    """All that the workers of one leg do."""
    DeepSpeedEngine.whole_below = 0  # else no parameter is large enough here for stage 3 to share it out
    for name in filter(runs_here, CASES):
        train_until(CASES[name][number], folder / name, LEGS[number][1])


def at_two(folder: Path) -> None:
    """Runs of two workers to hold the others against: DDP's whole ones, and those in bf16."""
    DeepSpeedEngine.whole_below = 0
    for precision in TOLERANCES:
        train_until(job("ddp", precision), folder / precision, 10)
    for strategy in filter(runs_here, IN_BF16):
        train_until(job(strategy, "fp32"), folder / f"{strategy} in bf16", 2, torch.bfloat16)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each case, by name."""
    folder = tmp_path_factory.mktemp("strategies")
    together(2, at_two, folder)
    for number, (workers, _) in enumerate(LEGS):
        together(workers, leg, number, folder)
    return folder


def column(run: Path, key: str) -> np.ndarray:
    return np.array([row[key] for row in read_steps(run) if row[key] is not None])


@pytest.mark.parametrize("name", skipped_by_name(CASES))
def test_a_run_resized_from_1_to_2_to_4_to_2_to_1_is_an_uninterrupted_one_of_ddp(runs: Path, name: str) -> None:
    config = CASES[name][0]
    tolerance, of_weights = TOLERANCES[config.train.precision]
    expected, run = runs / config.train.precision, runs / name

    assert list(column(run, "world_size")) == [1, 1, 2, 2, 4, 4, 2, 2, 1, 1]
    for key in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose(column(run, key), column(expected, key), rtol=tolerance)
    for key in ("lr", "kept_length", "layer_tokens"):
        assert list(column(run, key)) == list(column(expected, key))
    trained = sorted(sample for row in read_ledger(run) for sample in row["sample_ids"])
    assert trained == list(range(10 * config.train.global_batch))
    ours, theirs = (weights(config, folder) for folder in (run, expected))
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=of_weights, atol=of_weights, msg=key)


def weights(config: ExperimentConfig, run: Path) -> dict[str, torch.Tensor]:
    """Those of the run's last checkpoint, in a plain model."""
    model = build_model(config.model, seed=0).double()
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    return dict(model.state_dict())


@pytest.mark.parametrize("strategy", skipped_by_name(IN_BF16[1:]))
def test_bf16_is_ddps_autocast_with_weights_and_sums_of_gradients_in_fp32(runs: Path, strategy: str) -> None:
    """The first step alone: from the second on, one bf16 rounding that falls the other way shows at 1e-5."""
    ours, ddps, fp32 = (runs / name for name in (f"{strategy} in bf16", "ddp in bf16", "fp32"))
    for key in ("loss", "grad_norm"):
        assert column(ours, key)[0] == pytest.approx(column(ddps, key)[0], rel=3e-7)
    assert column(fp32, "grad_norm")[0] != pytest.approx(column(ddps, "grad_norm")[0], rel=1e-5)
