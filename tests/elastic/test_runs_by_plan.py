"""Workers that change by plan, by accident and as the cluster allows: nothing of it shows in what is trained."""

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kills import processes_of_this_ray
from runs import FLOAT64, config_of, kill_at, losses, write_job
from tokendrop.errors import UserError
from tokendrop.launch.trainer import run_training
from tokendrop.track.audit import audit
from tokendrop.track.journal import MetricsTail
from tokendrop.track.run_folder import read_attempts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SIXTEEN = ("train.length=16 steps", "checkpoint.every=5 steps", "evaluate.every=8 steps")


def segments(*sizes: tuple[str, int]) -> str:
    return f"scaling.segments=[{', '.join(f'{{from: {start}, workers: {workers}}}' for start, workers in sizes)}]"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a corpus, whose token shards the runs share."""
    return write_job(tmp_path_factory.mktemp("elastic"))


def trained(job: Path, *overrides: str) -> dict[str, Any]:
    return run_training(config_of(job, *SIXTEEN, *overrides))


@pytest.fixture(scope="module")
def fixed(job: Path, ray_cluster: None) -> list[float]:
    """The losses of one worker that nothing happens to."""
    return losses(Path(trained(job)["run"]))


def stretches(run: str) -> list[tuple[int, int, int | None]]:
    found = audit(Path(run))
    assert found.is_clean
    return [(one.from_step, one.to_step, one.world_size) for one in found.world_sizes]


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        pytest.param("fit_per_segment", [(0, 1), (8, 2)], marks=pytest.mark.long),
        ("schedule", [(0, 1), (4, 2), (12, 1)]),
    ],
)
def test_workers_that_change_by_plan_do_not_show_in_samples_or_losses(
    job: Path, fixed: list[float], mode: str, sizes: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = segments(*((f"{start} steps", workers) for start, workers in sizes))
    result = trained(job, f"scaling.mode={mode}", plan)
    np.testing.assert_allclose(losses(Path(result["run"])), fixed, rtol=FLOAT64)
    changes = [(start, before, after) for (_, before), (start, after) in pairwise(sizes)]
    ends = [*(start for start, _ in sizes[1:]), 16]
    planned = [(start + 1, end, workers) for (start, workers), end in zip(sizes, ends, strict=True)]
    assert stretches(result["run"]) == planned
    assert (result["resizes"], result["restarts"]) == (len(changes), 0)
    _, pauses = read_attempts(Path(result["run"]))
    assert [(one["resize_at"], one["from"], one["to"]) for one in pauses] == changes
    for one in pauses:
        assert sum(one["parts_s"].values()) == pytest.approx(one["pause_s"])
        assert min(one["parts_s"].values()) >= 0
    said = capsys.readouterr().err
    assert all(f"resize   {before} -> {after} workers at step {start}: " in said for start, before, after in changes)
    assert "a worker was lost" not in said


@pytest.mark.long
def test_a_worker_killed_on_a_full_cluster_costs_no_sample_and_the_plan_goes_on(job: Path) -> None:
    longer = ("train.length=200 steps", "checkpoint.every=40 steps", "evaluate.every=100 steps")
    runs = job.parent / "killed"
    killer = threading.Thread(target=kill_at, args=(runs, 50))
    killer.start()
    plan = segments(("0%", 2), ("160 steps", 1))
    full = ("scaling.mode=schedule", "scaling.cpus_per_worker=2", plan)  # all that there is
    result = trained(job, *longer, *full, f"runs_folder={runs}")
    killer.join()
    assert (result["resizes"], result["restarts"]) == (1, 1)
    assert stretches(result["run"]) == [(1, 160, 2), (161, 200, 1)]


@pytest.mark.long
def test_a_cluster_that_has_less_than_the_plan_wants_gives_what_it_has(
    job: Path, fixed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = segments(("0%", 4), ("12 steps", 1))
    result = trained(job, "scaling.mode=schedule", "scaling.cpus_per_worker=2", plan, "scaling.patience_s=1")
    np.testing.assert_allclose(losses(Path(result["run"])), fixed, rtol=FLOAT64)
    assert stretches(result["run"]) == [(1, 12, 2), (13, 16, 1)]
    assert "note     the plan has up to 4 workers, this cluster has CPUs for 2" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "cpus"), [("schedule", 5), ("fit_per_segment", 2)])
def test_a_cluster_that_never_has_the_workers_is_told_of_in_one_sentence(job: Path, mode: str, cpus: int) -> None:
    with pytest.raises(UserError, match=r"^scaling: \d workers want \d+ CPUs, this cluster has 4; lower .+$"):
        trained(job, f"scaling.mode={mode}", segments(("0%", 4)), f"scaling.cpus_per_worker={cpus}")


@pytest.mark.long
def test_a_fast_resize_has_its_processes_before_it_is_due(job: Path, fixed: list[float]) -> None:
    plan, runs = segments(("0%", 1), ("60 steps", 2)), job.parent / "fast"
    before_the_pause: set[int] = set()
    synchronizers: set[int] = set()
    pids: list[int] = []

    def watch() -> None:
        """Note the groups' processes until the first group pauses, and rank 0 of each group."""
        while not (found := list(runs.glob("*/metrics.jsonl"))):
            time.sleep(0.02)
        tail, is_paused = MetricsTail(found[0].parent), False
        while len(pids) < 2:
            workers = {process.pid for process in processes_of_this_ray("ray::RayTrainWorker")}
            ours = {process.pid for process in processes_of_this_ray("ray::SynchronizationActor")}
            lines = tail.read()
            is_paused = is_paused or any("paused_at" in line for line in lines)
            if not is_paused:
                before_the_pause.update(workers)
                synchronizers.update(ours)
            pids.extend(line["pid"] for line in lines if "attempt_from" in line)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    long = ("train.length=62 steps", "model.width=96", "train.micro_batch=1")  # so that they start before the edge
    result = trained(job, "scaling.mode=schedule", "scaling.fast_resize=true", plan, f"runs_folder={runs}", *long)
    watcher.join(10)
    assert len(pids) == 2
    assert set(pids) <= before_the_pause
    assert len(synchronizers) == 2  # Ray's own actor of each group
    assert (result["resizes"], result["restarts"]) == (1, 0)
    assert stretches(result["run"]) == [(1, 60, 1), (61, 62, 2)]
