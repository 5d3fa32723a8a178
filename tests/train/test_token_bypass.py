"""TokenBypass in the loop: running scores are the run's, whatever workers train it and wherever they stop."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attempts import lone_worker
from groups import together, train_until
from tiny import TOKENS, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.track.journal import read_steps
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS, step_name
from tokendrop.train.loop import accumulate
from tokendrop.train.reader import CheckpointReader, load_into
from tokendrop.train.worker import build_engine

STEPS = 6
LEGS = (("ddp", 2, 3), ("fsdp", 4, 5), ("ddp", 1, STEPS))
"""Strategy, workers, and the step at which they are lost; what was not saved, every second step, is done again."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def job(strategy: str = "ddp") -> ExperimentConfig:
    drop = {"method": "token_bypass", "first": 1, "last": 2, "special_tokens": [7], "beta": 0.5}
    return experiment(
        train__strategy=strategy,
        train__micro_batch=2,
        train__warmup="0 steps",
        drop={**drop, "schedule": {"kind": "constant", "kept": 6}},
    )


def scores_at(run: Path, step: int) -> torch.Tensor:
    state = {"method": {"token_scores": torch.zeros(50, dtype=torch.float64)}}
    load_into(state, CheckpointReader(run / CHECKPOINTS / step_name(step)))
    return state["method"]["token_scores"]


def test_scores_and_losses_are_those_of_one_worker_on_a_path_of_resizes_and_deaths(tmp_path: Path) -> None:
    together(1, train_until, job(), tmp_path / "one", STEPS)
    for strategy, workers, stop in LEGS:
        together(workers, train_until, job(strategy), tmp_path / "many", stop)
    one, many = (read_steps(tmp_path / name) for name in ("one", "many"))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[key] for row in many], [row[key] for row in one], rtol=1e-10, err_msg=key)
    assert [row["world_size"] for row in many] == [2, 2, 4, 4, 1, 1]
    for step in (2, 4, STEPS):
        assert (scores_at(tmp_path / "one", step) != 10).sum() > 40  # nearly every token was a label
        torch.testing.assert_close(scores_at(tmp_path / "many", step), scores_at(tmp_path / "one", step))


def test_the_tokens_that_are_hard_to_predict_stay() -> None:
    config = job()
    parts = lone_worker(config)
    dropping, scores = parts.dropping, parts.scores
    for step in range(3):
        accumulate(config, config.plan, parts, step)
        scores.end_step()
    (*_, batch) = parts.batches.of_step(3)
    accumulate(config, config.plan, parts, 3)
    assert dropping is not None
    kept_BK, ids_BS = dropping.kept(1), batch.inputs()["input_ids_BS"]
    assert isinstance(kept_BK, torch.Tensor)
    scores_BS = scores.of(ids_BS)
    least_kept = scores_BS.gather(1, kept_BK).amin(1)
    left_BS = torch.ones(len(ids_BS), TOKENS, dtype=torch.bool).scatter(1, kept_BK, False)
    assert (scores_BS.masked_fill(~left_BS, -torch.inf).amax(1) <= least_kept).all()
    assert least_kept.unique().numel() > 1


def test_a_checkpoint_without_scores_is_not_taken_for_one_with_them(tmp_path: Path) -> None:
    plain = experiment(train__micro_batch=2)
    together(1, train_until, plain, tmp_path / "plain", STEPS)
    config = job()
    checkpoints = Checkpoints(tmp_path / "plain" / CHECKPOINTS, keep=1, meta={}, scores=config.drop.scores(50))
    newest = checkpoints.newest()
    assert newest is not None
    with pytest.raises(Exception, match="can't be read as a checkpoint of this model"):
        checkpoints.load(build_engine(config, torch.device("cpu"))[0], newest)
