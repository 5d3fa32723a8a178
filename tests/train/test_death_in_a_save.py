"""SIGKILL between any two files of a save: what was committed counts, the run goes on from it, and nothing stays."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from attempts import history, new_engine, state
from deaths import die_before
from groups import apart, together, train_until
from tiny import assert_same, experiment
from tokendrop.schedule.duration import Duration
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, committed, newest_complete, newest_whole, step_name
from tokendrop.train.storage import INDEX

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

JOB = experiment(model__layers=3)
BEFORE, SAVED, END = 2, 4, 6
RENAMED = f"rename {step_name(SAVED)}.partial"
DIFFERENT_SUMS = 1e-10  # float64: gradients added up by two workers, or by one


def save_and_die(run: Path, rank: int, number: int | None) -> None:
    """Train from the checkpoint before to the next one; the worker `rank` dies in its save."""
    if rank == dist.get_rank():
        die_before(number, run / CHECKPOINTS, run.with_suffix(".log"))
    train_until(JOB, run, SAVED, keep=1)


def go_on(runs: list[Path]) -> None:
    """To the end, saving at other steps than before, so that no save takes the place of one that was cut off."""
    for run in runs:
        train_until(replace(JOB, checkpoint=replace(JOB.checkpoint, every=Duration.parse("3 steps"))), run, END, keep=1)


def died(run: Path, workers: int, number: int | None) -> list[str]:
    """What the last worker changed below the checkpoints, up to its death before the nth change, if any."""
    rank = workers - 1
    if number is None:
        together(workers, save_and_die, run, rank, number, start_method="fork")
    else:
        with pytest.raises(ProcessExitedException, match=f"process {rank} terminated with signal SIGKILL"):
            together(workers, save_and_die, run, rank, number, start_method="fork")
    return run.with_suffix(".log").read_text().splitlines()


def begin(folder: Path) -> None:
    """A run that nothing happens to, all of its checkpoints kept; and one that has died in its second save."""
    together(1, train_until, JOB, folder / "full", END, start_method="fork")
    together(1, train_until, JOB, folder / "begun", BEFORE, start_method="fork")
    whole = died(copy_of(folder / "begun", folder / "first"), 1, None)
    died(folder / "begun", 1, whole.index(RENAMED))


def die_everywhere(folder: Path, workers: int) -> None:
    """Runs below `folder`, by the number of the change before which they die, and one that lives."""
    begun = folder.parent / "begun"
    changes = died(copy_of(begun, folder / "alive"), workers, None)
    for number in range(len(changes)):
        assert died(copy_of(begun, folder / str(number)), workers, number) == changes[: number + 1]


def copy_of(run: Path, copy: Path) -> Path:
    return Path(shutil.copytree(run, copy))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs `full` and `begun`."""
    folder = tmp_path_factory.mktemp("deaths")
    apart(begin, folder)
    return folder


def restored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, as a worker restores them."""
    engine = new_engine(JOB)
    Checkpoints(checkpoint.parent, keep=1, meta={}).load(engine, checkpoint)
    return state(engine)


@pytest.mark.parametrize(("workers", "tolerance"), [(1, 0.0), (2, DIFFERENT_SUMS)])
def test_a_death_between_any_two_files_of_a_save_costs_no_more_than_that_save(
    folder: Path, workers: int, tolerance: float
) -> None:
    full, runs = folder / "full", folder / f"of {workers}"
    expected = {one.name: restored(one) for one in committed(full / CHECKPOINTS)}
    runs.mkdir()
    apart(die_everywhere, runs, workers)
    changes = (runs / "alive.log").read_text().splitlines()
    assert set(changes) == changes_of_a_save(workers)
    died = [runs / str(number) for number in range(len(changes))]
    for number, run in enumerate(died):
        step = SAVED if RENAMED in changes[:number] else BEFORE
        newest = newest_whole(run / CHECKPOINTS)
        assert newest == newest_complete(run / CHECKPOINTS) == run / CHECKPOINTS / step_name(step)
        assert_same(restored(newest), expected[newest.name], tolerance=tolerance)

    together(1, go_on, died)
    for run in died:
        (last,) = (run / CHECKPOINTS).iterdir()  # nothing is left of the save that was cut off
        assert_same(restored(last), expected[step_name(END)], tolerance=tolerance)
        for ours, theirs in zip(history(run), history(full), strict=True):
            for key in theirs.keys() - {"world_size"}:
                same = ours[key] == theirs[key] or ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=0)
                assert same, (run.name, key)


def changes_of_a_save(workers: int) -> set[str]:
    """What the last worker of a save changes: leftovers go, files come, all is renamed, and the one before goes."""
    saved, before = f"{step_name(SAVED)}.partial", step_name(BEFORE)
    own = f"{saved}/__{workers - 1}_0.distcp"
    if workers > 1:
        return {f"mkdir {saved}", f"open {own}", f"fsync {own}"}
    files = [f"{saved}/{name}" for name in ("__0_0.distcp", INDEX, META)]
    gone = [f"{folder}/{Path(file).name}" for folder in (saved, before) for file in files]
    changes = {f"{what} {file}" for what in ("open", "fsync") for file in files} | {f"remove {file}" for file in gone}
    looked_at = {
        f"open {before}/{META}"
    }  # whether somebody reads it: an exclusive lock wants a file that is open to write
    return changes | looked_at | {f"rmdir {saved}", f"mkdir {saved}", RENAMED, f"rmdir {before}"}
