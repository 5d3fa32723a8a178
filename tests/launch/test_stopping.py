"""A submitted run that is stopped saves itself first; one that is killed leaves nothing of it on the cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from heads import Head
from kills import last_step, worker_pid
from tokendrop.track.journal import METRICS
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step

pytestmark = [pytest.mark.ray, pytest.mark.alone]

WAIT_S, STOPPED_WITHIN_S, GONE_WITHIN_S = 120, 10, 60
LONG = ["train.length=100000 steps", "checkpoint.every=100%", "evaluate.every=100%", "scaling.workers=2"]
# of a killed run, Ray's own PlacementGroupCleaner stays, without work: it can't end itself
OF_A_RUN = {"TrainController", "RayTrainWorker", "SynchronizationActor", "PreemptionWatcher"}
ALIVE = """
import json
from ray.util.state import list_actors, list_placement_groups
actors = [one.class_name for one in list_actors(filters=[("state", "!=", "DEAD")])]
groups = [one.state for one in list_placement_groups(filters=[("state", "!=", "REMOVED")])]
print(json.dumps({"actors": actors, "groups": groups}))
"""


def until(what: Callable[[], bool], name: str, within_s: float = WAIT_S) -> float:
    """Seconds until it came true."""
    start = time.monotonic()
    while not what():
        assert time.monotonic() - start < within_s, name
        time.sleep(0.1)
    return time.monotonic() - start


def jobs(head: Head, *arguments: str) -> subprocess.CompletedProcess[str]:
    address = ("--address", head.address)
    return head.run(sys.executable, "-m", "ray.scripts.scripts", "job", *arguments[:1], *address, *arguments[1:])


def submitted(head: Head, job: str, *overrides: str) -> Path:
    """The run folder of a job that trains."""
    arguments = ["python", "jobs/run.py", "train", "jobs/tiny.yaml", f"run={job}", *LONG, *overrides]
    data = f"data.corpus=[{json.dumps(str(head.folder / 'text'))}]"
    done = jobs(head, "submit", "--no-wait", "--submission-id", job, "--working-dir", ".", "--", *arguments, data)
    assert done.returncode == 0, done.stdout + done.stderr
    run = head.results / "runs" / job
    until(lambda: (run / METRICS).exists() and last_step(run) >= 3, "step 3")
    return run


def alive(head: Head) -> dict[str, list[str]]:
    """Actors and placement groups on the cluster."""
    environment = {**head.environment, "RAY_ADDRESS": head.address, "RAY_API_SERVER_ADDRESS": head.address}
    done = subprocess.run([sys.executable, "-c", ALIVE], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def assert_gone(head: Head) -> None:
    """Nothing of a run stays on the cluster."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := alive(head))["groups"] or OF_A_RUN & set(left["actors"]):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


@pytest.mark.parametrize("mode", ["fixed", "schedule"])
def test_ray_job_stop_ends_a_run_in_time_with_its_last_step_saved(head: Head, mode: str) -> None:
    plan = "scaling.segments=[{from: 0%, workers: 2}]"
    how = [f"scaling.mode={mode}", *([plan] if mode == "schedule" else [])]
    run = submitted(head, f"stopped-{mode}", *how)
    assert committed_step(run / CHECKPOINTS) == 0
    before = last_step(run)
    assert jobs(head, "stop", "--no-wait", f"stopped-{mode}").returncode == 0
    until(lambda: "STOPPED" in jobs(head, "status", f"stopped-{mode}").stdout.upper(), "the stop", STOPPED_WITHIN_S)
    assert committed_step(run / CHECKPOINTS) >= before
    assert_gone(head)


BY_PLAN = ("scaling.mode=schedule", "scaling.fast_resize=true", "scaling.segments=[{from: 0%, workers: 2}]")


@pytest.mark.parametrize(
    "how", [(), pytest.param(BY_PLAN, marks=[pytest.mark.long, pytest.mark.schedule])], ids=["fixed", "schedule"]
)
def test_a_run_whose_driver_is_killed_leaves_no_actor_and_no_placement_group(head: Head, how: tuple[str, ...]) -> None:
    name = "killed-by-plan" if how else "killed"
    run = submitted(head, name, *how)
    worker = psutil.Process(worker_pid(run))
    (driver,) = [
        process
        for process in psutil.process_iter()
        if f"run={name}" in process.cmdline() and "jobs/run.py" in process.cmdline()
    ]
    before = alive(head)
    assert {"TrainController", "RayTrainWorker"} <= set(before["actors"])
    assert before["groups"]
    os.kill(driver.pid, signal.SIGKILL)
    assert_gone(head)
    until(lambda: not worker.is_running(), "its worker to end", GONE_WITHIN_S)
