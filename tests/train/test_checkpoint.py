"""Saving, dying, going on: a run interrupted anywhere ends where an uninterrupted one does."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from groups import go_by, together
from tiny import Rows, assert_same, experiment, gpt
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.method import attach
from tokendrop.models.batch import Batch
from tokendrop.models.build import build_model
from tokendrop.track.journal import Journal, read_ledger, read_steps
from tokendrop.train.checkpoint import Checkpoints, load_weights
from tokendrop.train.committed import committed, read_meta, step_name
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.loop import Parts, train
from tokendrop.train.optimizer import build_optimizer

ACCUMULATED = 1e-10  # float64, over 6 steps of Adam on gradients added up in another order
# one process without a process group, as torch remarks
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class WorkerLostError(Exception):
    """The worker is gone."""


class RowsUntil(Rows):
    """Rows that end with the worker's death at a step; what it had not committed is lost."""

    def __init__(self, config: ExperimentConfig, dies_at: int | None) -> None:
        super().__init__(config)
        self.dies_at = dies_at

    def of_step(self, step: int) -> Iterator[Batch]:
        for batch in super().of_step(step):
            if step == self.dies_at and batch.number == 1:
                raise WorkerLostError
            yield batch


def new_engine(config: ExperimentConfig) -> DdpEngine:
    model = build_model(config.model, seed=config.seed).double()
    return DdpEngine(model, build_optimizer(model, config.train), torch.float64)


def attempt(
    config: ExperimentConfig,
    run: Path,
    *,
    dies_at: int | None = None,
    stop: int | None = None,
    pause: int | None = None,
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
    parts = Parts(
        engine=engine,
        dropping=dropping,
        batches=RowsUntil(config, dies_at),
        checkpoints=checkpoints,
        recorder=Journal(run, rank=0, world_size=1, start=start),
        world_size=1,
        pause=lambda step: step + 1 == pause,
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
        f"{names[id(p)]}.{key}": value for p, of_p in engine.optimizer.state.items() for key, value in of_p.items()
    }
    return dict(engine.model.state_dict()) | moments


def history(run: Path) -> list[dict[str, object]]:
    """The committed steps without what a clock measured."""
    return [{k: v for k, v in row.items() if not k.endswith("time_s")} for row in read_steps(run)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[DdpEngine, Path]:
    run = tmp_path_factory.mktemp("uninterrupted")
    return attempt(experiment(), run), run


@given(st.lists(st.integers(0, 5), max_size=3).map(sorted))
@settings(max_examples=10)
def test_a_run_that_dies_and_goes_on_ends_where_an_uninterrupted_one_does(
    uninterrupted, tmp_path_factory: pytest.TempPathFactory, deaths: list[int]
) -> None:
    expected, full_run = uninterrupted
    run, config = tmp_path_factory.mktemp("interrupted"), experiment()
    for dies_at in deaths:
        with pytest.raises(WorkerLostError):
            attempt(config, run, dies_at=dies_at)

    engine = attempt(config, run)

    assert_same(state(engine), state(expected))
    assert history(run) == history(full_run)
    assert [row["step"] for row in read_steps(run)] == list(range(1, config.steps + 1))
    trained = sorted(sample for row in read_ledger(run) for sample in row["sample_ids"])
    assert trained == list(range(config.steps * config.train.global_batch))


@given(st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=10)
def test_a_run_that_stops_or_pauses_anywhere_is_saved_there_and_goes_on_as_if_it_had_not(
    uninterrupted, tmp_path_factory: pytest.TempPathFactory, stop: int, pause: int
) -> None:
    expected, full_run = uninterrupted
    run, config = tmp_path_factory.mktemp("stopped"), experiment()
    attempt(config, run, stop=stop, pause=pause)

    engine = attempt(config, run)

    assert_same(state(engine), state(expected))
    assert history(run) == history(full_run)


def test_the_schedule_and_the_rate_of_a_run_are_those_of_its_plan(uninterrupted) -> None:
    plan = experiment().plan()
    for step, row in enumerate(read_steps(uninterrupted[1])):
        assert row["kept_length"] == plan.at(step).kept_length
        assert row["lr"] == plan.lr(step)
        assert row["layer_tokens"] == plan.layer_tokens(step + 1)
        assert (row["val_loss"] is not None) == (step + 1 in (3, 6))


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_a_run_does_not_depend_on_its_micro_batch(uninterrupted, tmp_path: Path, micro_batch: int) -> None:
    engine = attempt(experiment(train__micro_batch=micro_batch), tmp_path)
    assert_same(state(engine), state(uninterrupted[0]), tolerance=ACCUMULATED)
    for ours, theirs in zip(history(tmp_path), history(uninterrupted[1]), strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=ACCUMULATED)


def test_a_finished_run_that_is_started_again_changes_nothing(uninterrupted) -> None:
    expected, run = uninterrupted
    before = history(run)
    assert_same(state(attempt(experiment(), run)), state(expected))
    assert history(run) == before


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    for keep in (1, 2, 9):
        run = tmp_path / str(keep)
        run.mkdir()
        attempt(experiment(checkpoint__keep=keep, checkpoint__every="1 step"), run)
        steps = [read_meta(checkpoint)["step"] for checkpoint in committed(run / "checkpoints")]
        assert steps == list(range(1, 7))[-keep:]


def test_a_save_that_was_never_committed_is_ignored_and_overwritten(tmp_path: Path) -> None:
    config = experiment()
    with pytest.raises(WorkerLostError):
        attempt(config, tmp_path, dies_at=4)
    folder = tmp_path / "checkpoints"
    (folder / f"{step_name(6)}.partial").mkdir()
    (folder / f"{step_name(6)}.partial" / "torn").write_text("half a shard")
    assert [path.name for path in committed(folder)] == [step_name(2), step_name(4)]
    attempt(config, tmp_path)
    assert [path.name for path in committed(folder)] == [step_name(4), step_name(6)]
    assert not list(folder.glob("*.partial"))
    assert not (folder / step_name(6) / "torn").exists()


def test_a_first_step_after_loading_is_the_step_that_would_have_come(tmp_path: Path) -> None:
    """Adam's own step count comes back too; a fresh optimizer would take a far larger step."""
    config = experiment()
    first = new_engine(config)
    batch = next(Rows(config).of_step(0))
    for _ in range(3):
        first.forward_backward(batch, share=1.0, last_micro_batch=True)
        first.step(lr=0.01, max_grad_norm=1.0)
    checkpoints = Checkpoints(tmp_path, keep=1, meta={})
    checkpoints.save(first, 3)
    checkpoints.wait()
    second = new_engine(config)
    assert checkpoints.load(second, committed(tmp_path)[0]) == 3
    assert_same(state(second), state(first))
    for one in (first, second):
        one.forward_backward(batch, share=1.0, last_micro_batch=True)
        one.step(lr=0.01, max_grad_norm=1.0)
    assert_same(state(second), state(first))


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    config = experiment()
    engine = new_engine(config)
    batch = next(Rows(config).of_step(0))
    engine.forward_backward(batch, share=1.0, last_micro_batch=True)
    engine.step(lr=0.01, max_grad_norm=1.0)
    saved = {name: value.clone() for name, value in engine.model.state_dict().items()}
    checkpoints = Checkpoints(tmp_path, keep=1, meta={})
    checkpoints.save(engine, 1)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    checkpoints.wait()
    plain = gpt()
    load_weights(plain, committed(tmp_path)[0])
    assert_same(dict(plain.state_dict()), saved)


def test_a_checkpoint_counts_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """Not when the next is saved: a worker that dies in between would lose twice as much."""
    checkpoints = Checkpoints(tmp_path, keep=1, meta={})
    checkpoints.save(new_engine(experiment()), 1)
    deadline = time.monotonic() + 30
    while not committed(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    checkpoints.wait()
    assert [path.name for path in committed(tmp_path)] == [step_name(1)]


def test_a_checkpoint_that_can_not_be_written_is_told_of_where_it_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1, meta={})
    checkpoints.save(new_engine(experiment()), 1)
    checkpoints.wait()
    (folder / step_name(2)).write_text("in the way")
    checkpoints.save(new_engine(experiment()), 2)
    with pytest.raises(OSError, match=step_name(2)):
        checkpoints.wait()


def test_the_weights_of_a_dropped_model_load_into_a_plain_one(uninterrupted) -> None:
    engine, run = uninterrupted
    plain = gpt()
    load_weights(plain, committed(run / "checkpoints")[-1])
    assert_same(dict(plain.state_dict()), dict(engine.model.state_dict()))


def test_a_checkpoint_says_what_it_is_of(tmp_path: Path) -> None:
    config = experiment()
    meta = {"model": asdict(config.model), "name": config.name}
    checkpoints = Checkpoints(tmp_path, keep=1, meta=meta)
    checkpoints.save(new_engine(config), 12)
    checkpoints.wait()
    assert read_meta(tmp_path / step_name(12)) == {**meta, "step": 12}


@pytest.mark.parametrize("content", [None, b"", b"{torn", b"\xff\xfe"])
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}: not a checkpoint"):
        read_meta(tmp_path)


def test_checkpoints_are_listed_by_step_however_many_digits(tmp_path: Path) -> None:
    for step in (999, 1000, 10, 2_000_000):
        (tmp_path / step_name(step)).mkdir()
    assert committed(tmp_path) == [tmp_path / step_name(step) for step in (10, 999, 1000, 2_000_000)]
    assert committed(tmp_path / "nothing here") == []


def test_ranks_go_on_from_what_rank_0_sees_whatever_their_own_view_of_the_storage(tmp_path: Path) -> None:
    views = [tmp_path / "now", tmp_path / "a minute ago"]
    for view, steps in zip(views, ([3, 6], [3]), strict=True):
        for step in steps:
            (view / step_name(step)).mkdir(parents=True)
    together(2, go_by, step_name(6), views)
