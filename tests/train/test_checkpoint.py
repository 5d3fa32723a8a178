"""Saving, dying, going on: a run interrupted anywhere ends where an uninterrupted one does."""

import errno
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attempts import WorkerLostError, attempt, history, new_engine, state
from mutations import flip_bit
from tiny import Rows, assert_same, experiment, gpt
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.track.journal import MetricsTail, read_ledger, read_steps
from tokendrop.train.checkpoint import Checkpoints, SetAsideError
from tokendrop.train.checkpoint_index import committed, newest_whole, read_meta, step_name
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.reader import load_weights

ACCUMULATED = 1e-10  # float64, over 6 steps of Adam on gradients added up in another order
# one process without a process group, as torch remarks
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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
    plan = experiment().plan
    for step, row in enumerate(read_steps(uninterrupted[1])):
        assert row["kept_length"] == plan.at(step).kept_length
        assert row["lr"] == plan.lr(step)
        assert row["layer_tokens"] == plan.layer_tokens(step + 1)
        assert (row["val_loss"] is not None) == (step + 1 in (3, 6))


@pytest.mark.parametrize("clock", ["step", "layer_token"])
def test_rates_that_cool_down_are_those_of_the_plan_though_the_run_died(tmp_path: Path, clock: str) -> None:
    config = experiment(train__decay="wsd", train__cooldown="2 steps", train__final_lr=0.001, train__lr_clock=clock)
    with pytest.raises(WorkerLostError):
        attempt(config, tmp_path, dies_at=5)
    engine = attempt(config, tmp_path)
    rates = [row["lr"] for row in read_steps(tmp_path)]
    assert rates == [config.plan.lr(step) for step in range(6)]
    assert {group["lr"] for group in engine.optimizers[0].param_groups} == {rates[-1]}
    if clock == "step":
        assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.0055, 0.001])


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


def test_a_save_that_was_never_committed_is_ignored_and_removed_by_the_next_one(tmp_path: Path) -> None:
    config = experiment()
    with pytest.raises(WorkerLostError):
        attempt(config, tmp_path, dies_at=4)
    folder = tmp_path / "checkpoints"
    for step in (5, 6):  # the run saved itself at a step at which it does not when it goes on, and at one where it does
        (folder / f"{step_name(step)}.partial").mkdir()
        (folder / f"{step_name(step)}.partial" / "torn").write_text("half a shard")
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
    found = read_meta(tmp_path / step_name(12))
    assert found.pop("files")
    assert found == {**meta, "step": 12}


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: not a checkpoint") as refused:
        read_meta(tmp_path)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("content", [None, b"", b"{torn", b"\xff\xfe", b"3", b"{}", b"[" * 10**5])
def test_a_checkpoint_of_which_nothing_is_to_be_known_is_damaged(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / step_name(3)).mkdir()
    if content is not None:
        (tmp_path / step_name(3) / "meta.json").write_bytes(content)
    with pytest.raises(DamagedDataError, match=f"^{tmp_path}/step_000000003/meta.json: .*[(]"):
        read_meta(tmp_path / step_name(3))


def test_checkpoints_are_listed_by_step_however_many_digits(tmp_path: Path) -> None:
    for step in (999, 1000, 10, 2_000_000):
        (tmp_path / step_name(step)).mkdir()
    assert committed(tmp_path) == [tmp_path / step_name(step) for step in (10, 999, 1000, 2_000_000)]
    assert committed(tmp_path / "nothing here") == []


def test_a_run_whose_newest_checkpoint_is_damaged_ends_where_an_undamaged_one_does(uninterrupted, tmp_path) -> None:
    """Its last steps are done again: none is lost, and none is there twice."""
    expected, full_run = uninterrupted
    config = experiment()
    with pytest.raises(WorkerLostError):
        attempt(config, tmp_path, dies_at=5)
    newest = committed(tmp_path / "checkpoints")[-1]
    assert newest.name == step_name(4)
    flip_bit(newest / "__0_0.distcp", 0.5)

    with pytest.raises(SetAsideError, match=rf"^{newest}/__0_0.distcp: damaged.*; {step_name(2)} counts in its place$"):
        attempt(config, tmp_path)
    engine = attempt(config, tmp_path)  # as Ray Train starts the workers anew

    assert_same(state(engine), state(expected))
    assert history(tmp_path) == history(full_run)
    trained = [sample for row in read_ledger(tmp_path) for sample in row["sample_ids"]]
    assert sorted(trained) == list(range(config.steps * config.train.global_batch))
    attempts = [line["attempt_from"] for line in MetricsTail(tmp_path).read(limit=-1) if "attempt_from" in line]
    assert attempts == [0, 2]


def test_storage_that_can_not_be_read_just_now_says_nothing_of_a_checkpoint(
    uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a network file system raises while it moves to another server must not set a checkpoint aside."""
    run = shutil.copytree(uninterrupted[1], tmp_path / "run")  # whose files nobody has read yet
    saved = committed(run / "checkpoints")

    def away(path: Path, *_: object) -> str:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    checkpoints = Checkpoints(run / "checkpoints", keep=9, meta={})
    with monkeypatch.context() as patched:
        patched.setattr("tokendrop.train.reader.read_part", away)
        patched.setattr("tokendrop.train.checkpoint_index.file_sha256", away)
        with pytest.raises(OSError, match="Stale file handle"):
            checkpoints.load(new_engine(experiment()), saved[-1])
        with pytest.raises(OSError, match="Stale file handle"):
            newest_whole(run / "checkpoints")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", away)
        with pytest.raises(OSError, match="Stale file handle"):
            checkpoints.load(new_engine(experiment()), saved[-1])
    assert checkpoints.newest() == newest_whole(run / "checkpoints") == saved[-1]
    assert committed(run / "checkpoints") == saved
