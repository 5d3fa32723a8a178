"""The probe by which kept lengths are decided: what dropping costs these very weights, and how that is recorded."""

import json
from pathlib import Path

import pytest
import torch

from masking import loss_by_masking
from tiny import Rows, experiment, gpt, loss_of
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import DamagedDataError
from tokendrop.launch.decisions import decisions_of
from tokendrop.method import Route, attach
from tokendrop.track.decisions import (
    DECISIONS,
    DecidedJob,
    begin_decisions,
    copy_decisions,
    read_decisions,
    with_decisions,
)
from tokendrop.track.journal import Journal
from tokendrop.train.adaptive import Decision, Decisions
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.loop import TrainComponents, decide
from tokendrop.train.optimizer import build_optimizers

SCHEDULE = {"kind": "adaptive", "start": 4, "increment": 4, "every": "2 steps", "budget": 0.5}
JOB = experiment(train__length="12 steps", drop__schedule=SCHEDULE)


def parts_of(config: ExperimentConfig, folder: Path, decisions: Decisions | None) -> TrainComponents:
    model = gpt()
    engine = DdpEngine(model, build_optimizers(model, config.train), torch.float64, loss=loss_of)
    return TrainComponents(
        engine=engine,
        dropping=attach(model, seed=config.seed),
        batches=Rows(config),
        checkpoints=Checkpoints(folder, keep=1, meta={}),
        recorder=Journal(folder, rank=0, world_size=1, start=0),
        world_size=1,
        decisions=decisions,
    )


def test_the_gap_is_the_held_out_loss_of_a_dense_reference_less_that_without_drops(tmp_path: Path) -> None:
    decisions = decisions_of(JOB, tmp_path, rank=0, group=None)
    assert decisions is not None
    parts = parts_of(JOB, tmp_path, decisions)
    decide(parts, decisions, 2)
    [decision] = read_decisions(tmp_path)["schedule"]

    dropping, routes = parts.dropping, [Route(first=layer, last=layer) for layer in (1, 2)]
    assert dropping is not None
    gaps = []
    for batch, _ in parts.batches.validation():
        dropping.draw(kept_length=4, step=2, sample_ids=batch.sample_ids_B, sequence_length=16)
        rows = batch.inputs()["input_ids_BS"], batch.inputs()["labels_BS"]
        gaps.append(loss_by_masking(gpt(), routes, dropping, rows) - loss_by_masking(gpt(), [], dropping_none(), rows))
    assert decision.gap is not None
    assert decision.gap == pytest.approx(torch.stack(gaps).mean().item(), rel=1e-10)
    assert abs(decision.gap) > 1e-3
    # and evaluation after it is whole again
    batch, _ = parts.batches.validation()[0]
    assert torch.equal(parts.engine.evaluate(batch).mean, loss_of(gpt().eval(), batch).mean)


def dropping_none():
    """Draws of a model that keeps everything."""
    dropping = attach(gpt(), seed=0)
    dropping.draw(kept_length=16, step=0, sample_ids=[0, 1, 2, 3], sequence_length=16)
    return dropping


@pytest.mark.parametrize(("gap", "kept"), [(1.0, 8), (-1.0, 8), (0.0, 4)])
def test_a_decision_is_recorded_before_it_counts_and_never_made_again(tmp_path: Path, gap: float, kept: int) -> None:
    first = decisions_of(JOB, tmp_path, rank=0, group=None)
    assert first is not None
    assert [step for step in range(13) if first.are_due(step)] == [2]
    first.decide(2, lambda config, step, key: gap)
    assert read_decisions(tmp_path) == {"schedule": [Decision(step=2, kept_length=kept, gap=gap)]}
    again = decisions_of(JOB, tmp_path, rank=0, group=None)
    assert again is not None
    for one in (first, again):
        assert one.config.plan.at(2).kept_length == one.config.plan.at(3).kept_length == kept
        assert [step for step in range(13) if one.are_due(step)] == [4]
    assert first.config == again.config


def test_where_the_budget_leaves_no_choice_nothing_is_probed(tmp_path: Path) -> None:
    decisions = decisions_of(JOB, tmp_path, rank=0, group=None)
    assert decisions is not None
    for step in (2, 4, 6, 8, 10):
        decisions.decide(step, lambda config, step, key: 0.0)
    made = read_decisions(tmp_path)["schedule"]
    assert {one.gap for one in made} == {0.0, None}
    assert made[-1].kept_length > 4


def test_a_checkpoint_whose_decisions_are_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    begin_decisions(tmp_path, JOB)
    assert decisions_of(JOB, tmp_path, rank=0, group=None, start=1) is not None
    with pytest.raises(DamagedDataError, match=r"a checkpoint of step 4 .* the decisions from step 2 on are missing$"):
        decisions_of(JOB, tmp_path, rank=0, group=None, start=4)


def test_who_follows_a_run_hears_of_each_decision_once(tmp_path: Path) -> None:
    followed, decisions = DecidedJob(JOB, tmp_path), decisions_of(JOB, tmp_path, rank=0, group=None)
    assert decisions is not None
    assert not followed.renew()
    for step, gap in ((2, 1.0), (4, 0.0)):
        decisions.decide(step, lambda config, step, key, gap=gap: gap)
        assert followed.renew()
        assert not followed.renew()
        assert followed.config == decisions.config


def test_a_copy_has_the_decisions_until_its_step(tmp_path: Path) -> None:
    decisions, copy = decisions_of(JOB, tmp_path, rank=0, group=None), tmp_path / "copy"
    assert decisions is not None
    for step in (2, 4, 6):
        decisions.decide(step, lambda config, step, key: 1.0)
    copy.mkdir()
    copy_decisions(tmp_path, copy, 4)
    assert with_decisions(JOB, copy).decided == {"schedule": with_decisions(JOB, tmp_path).decided["schedule"][:2]}
    assert with_decisions(JOB, tmp_path, until=4) == with_decisions(JOB, copy)


def test_decisions_of_another_job_and_damaged_ones_are_told(tmp_path: Path) -> None:
    decisions = decisions_of(JOB, tmp_path, rank=0, group=None)
    assert decisions is not None
    decisions.decide(2, lambda config, step, key: 1.0)
    other = experiment(train__length="12 steps", drop__schedule=SCHEDULE | {"every": "3 steps"})
    with pytest.raises(
        DamagedDataError, match=r"decisions\.json: not the decisions of the job in .*not at those of the schedule\)$"
    ):
        with_decisions(other, tmp_path)
    tree = json.loads((tmp_path / DECISIONS).read_text())
    tree["decisions"]["schedule"][0]["kept_length"] = 4
    (tmp_path / DECISIONS).write_text(json.dumps(tree))
    with pytest.raises(DamagedDataError, match=r"decisions\.json: damaged \(its checksum is another one\)"):
        with_decisions(JOB, tmp_path)
