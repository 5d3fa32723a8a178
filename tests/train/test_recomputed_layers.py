"""Layers that are computed again in some parts of a run, in others not, show in nothing that is trained."""

from pathlib import Path

import pytest
import torch

from groups import together, train_until
from tiny import Rows, assert_same, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.models.gpt import Gpt
from tokendrop.models.layer import recompute_layers
from tokendrop.track.journal import Journal, read_steps
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.loop import TrainComponents, accumulate
from tokendrop.train.reader import load_weights
from tokendrop.train.worker import build_engine

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LIMIT = "0.48 MB"  # of which a micro batch at up to 10 tokens keeps less, and more from 13 on
CASES = {"alone": (1, "ddp"), "ddp": (2, "ddp"), "fsdp": (2, "fsdp")}


def job(strategy: str, *, dropout: float, again: bool | str) -> ExperimentConfig:
    return experiment(
        model__dropout=dropout,
        train__strategy=strategy,
        train__micro_batch=4,
        train__activation_checkpointing=again,
    )


def leg(workers: int, folder: Path) -> None:
    """What each worker of a group does."""
    for case, (size, strategy) in CASES.items():
        for dropout in (0.0, 0.2) if size == workers else ():
            for again in (False, LIMIT):
                train_until(job(strategy, dropout=dropout, again=again), folder / f"{case} {dropout} {again}", 6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recomputed")
    for workers in (1, 2):
        together(workers, leg, workers, folder)
    return folder


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_layers_that_are_kept_bit_for_bit(
    runs: Path, case: str, dropout: float
) -> None:
    config = job(CASES[case][1], dropout=dropout, again=LIMIT)
    assert {segment.recomputes for segment in config.plan.segments} == {False, True}
    again, kept = (runs / f"{case} {dropout} {how}" for how in (LIMIT, False))
    for key in ("loss", "grad_norm", "val_loss", "flops"):
        values = [[row[key] for row in read_steps(run)] for run in (again, kept)]
        assert values[0] == values[1]
        assert len(values[0]) == 6
    assert_same(weights(config, again), weights(config, kept))


def weights(config: ExperimentConfig, run: Path) -> dict[str, torch.Tensor]:
    model = config.task.build(config).build_model(seed=0).double()
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    return dict(model.named_parameters())


def test_the_loop_computes_layers_again_where_its_plan_says(tmp_path: Path) -> None:
    config = job("ddp", dropout=0.0, again=LIMIT)
    engine, dropping = build_engine(config, torch.device("cpu"))
    assert isinstance(engine.model, Gpt)
    calls: list[int] = []
    engine.model.blocks[1].get_submodule("norm_1").register_forward_hook(lambda *_: calls.append(1))
    parts = TrainComponents(
        engine=engine,
        dropping=dropping,
        batches=Rows(config),
        checkpoints=Checkpoints(tmp_path, keep=1, meta={}),
        recorder=Journal(tmp_path, rank=0, world_size=1, start=0),
        world_size=1,
    )
    for step in range(config.steps):
        calls.clear()
        accumulate(config, config.plan, parts, step)
        assert len(calls) == config.plan.at(step).accumulation * (2 if config.plan.at(step).recomputes else 1)


def test_a_model_without_such_layers_is_refused() -> None:
    recompute_layers(torch.nn.Linear(2, 2), again=False)
    with pytest.raises(UserError, match=r"^train\.activation_checkpointing: Linear has no layer that can be computed"):
        recompute_layers(torch.nn.Linear(2, 2), again=True)
