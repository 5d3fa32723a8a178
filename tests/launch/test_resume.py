"""What a run that goes on may have anew, and what it may not."""

import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from runs import begin
from tiny import experiment
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.launch.resume import check_goes_on, take_up
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, aside, committed, read_meta, step_name, write_meta
from tokendrop.train.sealed import file_sha256
from tokendrop.train.storage import INDEX

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return begin(tmp_path_factory.mktemp("begun"), experiment())


ANOTHER: dict[str, tuple[object, str, str]] = {
    "seed": (5, "1234", "5"),
    "train__global_batch": (16, "8", "16"),
    "train__peak_lr": (0.02, "0.01", "0.02"),
    "train__final_lr": (0.001, "0.0", "0.001"),
    "train__warmup": ("3 steps", "2 steps", "3 steps"),
    "train__decay": ("linear", "cosine", "linear"),
    "train__lr_clock": ("step", "layer_token", "step"),
    "train__weight_decay": (0.0, "0.1", "0.0"),
    "train__beta1": (0.5, "0.9", "0.5"),
    "train__beta2": (0.5, "0.95", "0.5"),
    "train__epsilon": (1e-7, "1e-08", "1e-07"),
    "train__max_grad_norm": (2.0, "1.0", "2.0"),
    "train__optimizer_state": ("bf16", "fp32", "bf16"),
    "train__precision": ("fp32", "fp64", "fp32"),
    "drop__schedule__start": (5, "4", "5"),
    "drop__schedule__until": ("70%", "80 %", "70 %"),
    "drop__schedule__increment": (2, "3", "2"),
    "drop__full_length_layers": ("none", "first_and_last", "none"),
    "data__shuffle_rows": (0, "65536", "0"),
    "data__validation_share": (0.5, "0.01", "0.5"),
    "data__text_key": ("body", "text", "body"),
    "data__rows_per_shard": (8, "4096", "8"),
    "data__tokenizer_vocab_size": (300, "4096", "300"),
}


@pytest.mark.parametrize("change", ANOTHER)
def test_what_decides_what_is_trained_stays(run, change) -> None:
    value, was, now = ANOTHER[change]
    key = change.replace("__", ".")
    with pytest.raises(UserError) as refused:
        check_goes_on(experiment(**{change: value}), run)
    assert str(refused.value) == f"{key}: {run} began with {was}, this job has {now}; want the same, or a new run"
    assert refused.value.exit_code == 2


def test_another_method_and_another_schedule_are_named(run) -> None:
    kept_whole = experiment(drop={"method": "none"})
    with pytest.raises(UserError, match=r"^drop\.method: .* began with random_ltd, this job has none; "):
        check_goes_on(kept_whole, run)
    constant = experiment(drop={"method": "random_ltd", "schedule": {"kind": "constant", "kept": 8}})
    with pytest.raises(UserError, match=r"^drop\.schedule\.kind: .* began with linear, this job has constant; "):
        check_goes_on(constant, run)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "renamed", "run": "mine", "runs_folder": "elsewhere"},
        {"train__micro_batch": 2},
        {"train__strategy": "fsdp", "train__compile": True, "train__activation_checkpointing": True},
        {"scaling": {"workers": 2, "max_restarts": 9}, "checkpoint": {"keep": 7}, "track": {"uri": None}},
        {"evaluate": {"every": "1 step", "sequences": 3}},
        {"data__corpus": ["copied"], "data__reader": "ray_data", "data__folder": "elsewhere", "data__max_rejected": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_where_and_how_it_runs_may_be_another(run, changes) -> None:
    check_goes_on(experiment(**changes), run)


def test_a_longer_run_is_one_whose_plan_was_the_same_so_far(run, tmp_path) -> None:
    with pytest.raises(
        UserError, match=r"^train\.length: up to step 4 this job would consume 1,328 layer tok.* 1,424 "
    ):
        check_goes_on(experiment(train__length="12 steps"), run)
    in_steps = {"drop__schedule__until": "5 steps"}
    check_goes_on(experiment(train__length="12 steps", **in_steps), begin(tmp_path, experiment(**in_steps)))


def test_with_dropout_a_micro_batch_draws_what_it_forgets_so_its_size_stays(tmp_path) -> None:
    run = begin(tmp_path, experiment(model__dropout=0.1))
    with pytest.raises(UserError, match=r"^train\.micro_batch: .* began with 4, this job has 2; "):
        check_goes_on(experiment(model__dropout=0.1, train__micro_batch=2), run)
    check_goes_on(experiment(model__dropout=0.1), run)


def test_a_checkpoint_that_holds_more_than_data_is_refused_before_anything_starts(tmp_path) -> None:
    run = begin(tmp_path, experiment())
    (checkpoint,) = committed(run / CHECKPOINTS)
    (checkpoint / INDEX).write_bytes(pickle.dumps(print))
    files = {name: file_sha256(checkpoint / name) for name in read_meta(checkpoint)["files"]}
    write_meta(checkpoint, {"step": 4, "model": asdict(experiment().model)}, files)
    with pytest.raises(UserError, match=r"index\.json: want an index of tensors in the files of ") as refused:
        check_goes_on(experiment(), run)
    assert refused.value.exit_code == 2


def test_a_run_is_looked_at_before_it_is_changed(tmp_path) -> None:
    """Another driver may be at work on it, and may have committed since, until its lock is held."""
    run = begin(tmp_path, experiment())
    (whole,) = committed(run / CHECKPOINTS)
    damaged = whole.with_name(step_name(6))
    shutil.copytree(whole, damaged)
    check_goes_on(experiment(), run)
    assert committed(run / CHECKPOINTS) == [whole, damaged]
    take_up(experiment(), run)
    assert committed(run / CHECKPOINTS) == [whole]
    assert aside(damaged).is_dir()


def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(tmp_path) -> None:
    run = begin(tmp_path, experiment())
    (committed(run / CHECKPOINTS)[0] / META).unlink()
    with pytest.raises(DamagedDataError, match=r"meta\.json: .* no other checkpoint that is whole$"):
        check_goes_on(experiment(), run)


def test_a_run_without_a_checkpoint_has_nothing_to_keep_to(tmp_path) -> None:
    run = begin(tmp_path, experiment())
    committed(run / CHECKPOINTS)[0].rename(tmp_path / "gone")
    check_goes_on(experiment(seed=5), run)
