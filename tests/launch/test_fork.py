"""A fork: it begins where a checkpoint of its parent is, as its parent did, and changes only what comes after."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forks import AT, JOB, STEPS, forked, history, trained, write_data
from runs import begin
from tiny import experiment
from tokendrop.atomic import exclusive_lock, is_locked
from tokendrop.elastic.control import RunControl
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.launch import fork
from tokendrop.launch.fork import begun_fork
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.resume import check_goes_on
from tokendrop.launch.worker import run_worker
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.audit import audit
from tokendrop.track.journal import LEDGER, METRICS, read_ledger, read_steps
from tokendrop.track.lineage import LINEAGE, read_lineage
from tokendrop.track.run_folder import describe_run, open_run_folder, summarize
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, remove_old, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def contents(folder: Path) -> dict[Path, tuple[int, int, bytes]]:
    """All that a folder holds, and when it was last written to."""
    found: dict[Path, tuple[int, int, bytes]] = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.stat()
        found[path] = status.st_mtime_ns, status.st_ino, path.read_bytes() if path.is_file() else b""
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run trained to its end that keeps all of its checkpoints."""
    runs = tmp_path_factory.mktemp("runs")
    run = runs / "parent"
    run.mkdir()
    config = with_absolute_paths(experiment(**JOB, runs_folder=str(runs), data__folder=str(data.parent)))
    describe_run(run, config, data)
    return trained(run, config, data)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_fork_that_changes_nothing_goes_on_as_its_parent_did_bit_for_bit(parent: Path, step: int) -> None:
    before = contents(parent)
    run = forked(parent, step)
    assert contents(parent) == before
    assert history(run) == history(parent)
    assert read_ledger(run) == read_ledger(parent)
    assert audit(run).is_clean
    lineage = read_lineage(run)
    assert lineage is not None
    assert (lineage.parent, lineage.step, lineage.overrides, lineage.changed) == (str(parent), step, (), {})
    own = [json.loads(line) for line in (run / METRICS).read_text().splitlines() if line]
    assert [line["step"] for line in own if "step" in line] == [*range(step + 1, STEPS + 1)]
    assert {key: value for key, value in summarize(run).items() if key in ("steps", "val_loss", "restarts")} == {
        key: value for key, value in summarize(parent).items() if key in ("steps", "val_loss", "restarts")
    }


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("train.peak_lr=0.02", "train.peak_lr"),
        ("train.weight_decay=0.5", "train.weight_decay"),
        ("train.beta2=0.5", "train.beta2"),
        ("train.decay=constant", "train.decay"),
        ("train.max_grad_norm=0.01", "train.max_grad_norm"),
    ],
)
def test_what_is_changed_shows_after_the_step_alone(parent: Path, change: str, key: str) -> None:
    run = forked(parent, AT, change)
    ours, theirs = history(run), history(parent)
    assert ours[:AT] == theirs[:AT]
    assert [one["step"] for one in ours] == [one["step"] for one in theirs]
    assert ours[AT]["loss"] == theirs[AT]["loss"]  # of the weights that both began with
    assert all(one["loss"] != other["loss"] for one, other in zip(ours[AT + 1 :], theirs[AT + 1 :], strict=True))
    lineage = read_lineage(run)
    assert lineage is not None
    assert [*lineage.changed] == [key]
    assert lineage.changed[key][1] == str(getattr(open_run_folder(run)[0].train, key.partition(".")[2]))


def test_another_schedule_counts_from_the_step_on(parent: Path) -> None:
    plan = open_run_folder(parent)[0].plan
    so_far = [segment for segment in plan.segments if segment.start < AT]
    stages = [f"{{at: {one.start} steps, kept: {one.kept_length}}}" for one in so_far]
    stages.append(f"{{at: {AT} steps, kept: 16}}")
    run = forked(parent, AT, f"drop.schedule={{kind: piecewise, stages: [{', '.join(stages)}]}}")
    assert history(run)[:AT] == history(parent)[:AT]
    assert [row["kept_length"] for row in history(run)[AT:]] == [16] * (STEPS - AT)
    consumed = [row["layer_tokens"] for row in history(run)]
    assert consumed == [open_run_folder(run)[0].plan.layer_tokens(step) for step in range(1, STEPS + 1)]
    assert np.diff(consumed)[AT - 1 :].tolist() == [8 * 4 * 16] * (STEPS - AT)


def test_a_fork_that_died_goes_on_by_the_same_name_and_by_resume(parent: Path, data: Path) -> None:
    changes = ("run=mine", "train.peak_lr=0.02")
    whole = forked(parent, AT, "train.peak_lr=0.02")
    with begun_fork(parent, AT, changes) as (config, run):
        RunControl(run).reset()
        RunControl(run).stop()  # as Ctrl-C does: it is saved at the next step
        run_worker(WorkerSpec(config=config, run=run, data=data))
    assert [row["step"] for row in read_steps(run)] == [*range(1, AT + 2)]
    with begun_fork(parent, AT, changes) as (again, same):  # what the same command finds
        assert (same, again) == (run, config)
        check_goes_on(again, same)
    trained(run, again, data)
    assert history(run) == history(whole)
    for other in ((parent, 6, changes), (whole, AT, changes), (parent, AT, ("run=parent",))):
        with pytest.raises(UserError, match=r"^run: .* is no fork of .*; want another name$"), begun_fork(*other):
            pass


def test_a_fork_of_a_fork_and_one_whose_parent_is_gone(parent: Path, tmp_path: Path) -> None:
    first = forked(parent, 2, f"runs_folder={tmp_path}", "train.peak_lr=0.02", "run=first")
    second = forked(first, 6, "train.peak_lr=0.01", "train.length=10 steps", "drop.schedule.until=64%")
    assert history(second)[:6] == history(first)[:6]
    assert len(history(second)) == 10
    lineage = read_lineage(second)
    assert lineage is not None
    assert (lineage.parent, lineage.step) == (str(first), 6)
    assert lineage.changed["train.peak_lr"] == ("0.02", "0.01")
    assert audit(second).is_clean
    first.rename(tmp_path / "moved")
    assert audit(second).is_clean
    assert summarize(second)["steps"] == 10


REFUSED = {
    "seed=5": "seed: 1234 in RUN, 5 in this fork; it decides which samples are read next, so want 1234, or a new run,"
    " with model.init_from for the same weights",
    "train.global_batch=16": "train.global_batch: 8 in RUN, 16 in this fork; it decides which samples",
    "data.corpus=[other]": r"data.corpus: \('\S+/unused',\) in RUN, \('other',\) in this fork; it decides",
    "data.shuffle_rows=0": "data.shuffle_rows: 65536 in RUN, 0 in this fork; it decides which samples",
    "model.layers=5": "model.layers: 4 in RUN, 5 in this fork; it decides what the checkpoint's weights are",
    "model.dropout=0.1": "model.dropout: 0.0 in RUN, 0.1 in this fork; it decides what",
    "train.optimizer=sgd": "train.optimizer: adamw in RUN, sgd in this fork; it decides what the checkpoint's",
    "train.precision=fp32": "train.precision: fp64 in RUN, fp32 in this fork; want both fp64, or none of them",
    "drop={method: token_bypass}": "drop.method: 'token_bypass' chooses by losses that the checkpoints of 'random_ltd'",
    "train.length=4 steps": "train.length: this fork begins at step 4 and ends at 4; want a longer one",
    "drop.schedule.start=8": r"drop.schedule.start: up to step 4 this job would consume [\d,]+ layer tokens and \S+"
    r" FLOPs, RUN has consumed [\d,]+ and \S+; want a schedule that is the same so far",
    "train.length=80 steps": r"train.length: up to step 4 this job would consume [\d,]+ layer tokens",
    "train.peak_lr=no": r"RUN/job.yaml: train.peak_lr: want a number, got",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_can_not_change_is_one_sentence_and_leaves_nothing(parent: Path, change: str, complaint) -> None:
    there = sorted(parent.parent.iterdir())
    assert_matches(complaint("fork", parent, "--at", AT, change), REFUSED[change], parent)
    assert sorted(parent.parent.iterdir()) == there


def test_momentum_can_not_begin_at_a_fork(tmp_path: Path) -> None:
    """Without it, torch's SGD has no state."""
    parent = begin(tmp_path, experiment(train__optimizer="sgd", train__momentum=0.0))
    with (
        pytest.raises(UserError, match=r"^train\.momentum: 0 in .*/run, whose checkpoints have none to go on with; "),
        begun_fork(parent, 4, ["train.momentum=0.9", f"runs_folder={tmp_path}"]),
    ):
        pass


def assert_matches(said: str, pattern: str, parent: Path) -> None:
    assert re.match(pattern.replace("RUN", re.escape(str(parent))), said), said
    assert "\n" not in said


def test_a_step_without_a_checkpoint_is_told_with_those_that_there_are(parent: Path, tmp_path: Path, complaint) -> None:
    for step in (1, 3, 7):
        said = complaint("fork", parent, "--at", step)
        assert said == f"--at: {parent} keeps no checkpoint of step {step}; want one of 2, 4, 6, 8"
    assert complaint("fork", tmp_path, "--at", 4).startswith(f"{tmp_path}: not a run folder")
    assert complaint("fork", parent, "--at", "0").startswith("--at: want a whole number of at least 1, got '0'")


def test_a_damaged_checkpoint_is_not_begun_with(parent: Path, data: Path, tmp_path: Path) -> None:
    run = forked(parent, 2, f"runs_folder={tmp_path}", "run=damaged")
    file = next((run / CHECKPOINTS / "step_000000004").glob("*.distcp"))
    file.write_bytes(bytes(len(file.read_bytes())))
    there = sorted(tmp_path.iterdir())
    with pytest.raises(DamagedDataError, match=file.name), begun_fork(run, 4):
        pass
    next((run / LEDGER).parent.glob("steps.parquet/000000002-*")).unlink()
    with (
        pytest.raises(DamagedDataError, match=r"steps\.parquet: damaged; want each step from 1 to 6"),
        begun_fork(run, 6),
    ):
        pass
    assert sorted(tmp_path.iterdir()) == there
    (run / LINEAGE).write_text("{}")
    with pytest.raises(DamagedDataError, match=LINEAGE):
        read_lineage(run)


def test_what_fails_before_it_trains_leaves_no_fork_and_what_trained_stays(parent: Path, data: Path) -> None:
    there = sorted(parent.parent.iterdir())
    with pytest.raises(UserError, match="no room"), begun_fork(parent, AT):
        raise UserError("no room")
    assert sorted(parent.parent.iterdir()) == there

    def fails_late() -> None:
        with begun_fork(parent, AT, ["run=late"]) as (config, run):
            trained(run, config, data)
            raise UserError("late")

    with pytest.raises(UserError, match="late"):
        fails_late()
    run = parent.with_name("late")
    assert len(history(run)) == STEPS


def test_a_parent_may_train_and_remove_its_checkpoints_meanwhile(parent: Path, tmp_path: Path, data: Path) -> None:
    """Its checkpoint stays for as long as it is copied, whoever trains there."""
    source = forked(parent, 2, f"runs_folder={tmp_path}", "run=source")
    copied = fork.copy_record

    def meanwhile(run: Path, to: Path, step: int) -> None:
        remove_old(source / CHECKPOINTS, keep=1)
        copied(run, to, step)

    with pytest.MonkeyPatch.context() as patch, exclusive_lock(source):
        patch.setattr(fork, "copy_record", meanwhile)
        run = forked(source, AT)
        assert is_locked(source)
    assert [*map(step_of, committed(source / CHECKPOINTS))] == [AT, STEPS]
    assert history(run) == history(parent)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([2, 4, 6]), st.floats(1e-4, 0.1), st.sampled_from(["cosine", "linear", "constant"]))
def test_rates_after_the_step_are_those_of_the_fork_s_own_job(parent: Path, step: int, peak: float, decay: str) -> None:
    run = forked(parent, step, f"train.peak_lr={peak!r}", f"train.decay={decay}")
    plan, before = open_run_folder(run)[0].plan, open_run_folder(parent)[0].plan
    rates = [row["lr"] for row in history(run)]
    assert rates == [before.lr(one) for one in range(step)] + [plan.lr(one) for one in range(step, STEPS)]
