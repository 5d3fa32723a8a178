"""Runs beside each other, in one process and in one sweep: neither shows in the other, and nothing of them stays."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune
from ray.util import placement_group_table
from tests.in_ray import trial

from runs import FLOAT64, config_of, losses, write_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.launch.trainer import run_training
from tokendrop.track.audit import audit

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

BY_PLAN = ("scaling.mode=schedule", "scaling.segments=[{from: 0%, workers: 1}, {from: 50%, workers: 2}]")
FIXED = ()
GONE_WITHIN_S = 30


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    job = write_job(tmp_path_factory.mktemp("concurrent"))
    prepare(config_of(job))
    return job


@pytest.fixture(scope="module")
def alone(job: Path) -> list[float]:
    return losses(Path(run_training(config_of(job))["run"]))


def check(result: dict[str, Any], alone: list[float], *, resizes: int) -> None:
    run = Path(result["run"])
    assert (result["restarts"], result["resizes"]) == (0, resizes)
    np.testing.assert_allclose(losses(run), alone, rtol=FLOAT64)
    assert audit(run).is_clean


def placement_groups_left() -> list[str]:
    return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def assert_no_placement_group_stays() -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := placement_groups_left():
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param((BY_PLAN, BY_PLAN), marks=pytest.mark.schedule, id="both by plan"),
        pytest.param((BY_PLAN, FIXED), marks=pytest.mark.schedule, id="one by plan"),
        pytest.param((FIXED, FIXED), id="both of fixed size"),
    ],
)
def test_two_runs_in_two_threads_are_as_each_alone(
    job: Path, alone: list[float], tmp_path: Path, jobs: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    with ThreadPoolExecutor(2) as threads:
        started = [
            threads.submit(run_training, config_of(job, f"runs_folder={tmp_path}/{name}", *overrides))
            for name, overrides in zip("ab", jobs, strict=True)
        ]
        results = [one.result() for one in started]
    for result, overrides in zip(results, jobs, strict=True):
        check(result, alone, resizes=int(overrides is BY_PLAN))
    assert_no_placement_group_stays()


@pytest.mark.schedule
def test_two_trials_of_a_sweep_are_as_each_alone(job: Path, alone: list[float], tmp_path: Path) -> None:
    configs = [config_of(job, f"runs_folder={tmp_path}/{name}", *how) for name, how in (("a", BY_PLAN), ("b", FIXED))]
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.01}),
        param_space={"config": tune.grid_search(configs)},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    found = sorted((one.metrics for one in results if one.metrics), key=lambda metrics: metrics["run"])
    for result, resizes in zip(found, (1, 0), strict=True):
        check(result, alone, resizes=resizes)
    assert_no_placement_group_stays()
