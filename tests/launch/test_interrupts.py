"""Ctrl-C and SIGTERM end a run within seconds, whatever it does just then, and leave nothing running."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from kills import Command, last_step, run_below
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare

pytestmark = [pytest.mark.ray, pytest.mark.alone]

ENDS_WITHIN_S = 10
MODES = {
    "fixed": ["scaling.mode=fixed"],
    "schedule": ["scaling.mode=schedule", "scaling.segments=[{from: 0%, workers: 1}]"],
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    return tiny_job(
        tmp_path,
        [corpus],
        data={"tokenizer": str(byte_tokenizer(tmp_path / "tokenizer.json"))},
        train={"length": "100000 steps"},
        scaling={"cpus_per_worker": 1},
    )


@pytest.mark.parametrize(("mode", "sent"), [("fixed", signal.SIGINT), ("schedule", signal.SIGTERM)])
def test_a_run_that_trains_ends_at_once(job: Path, tmp_path: Path, mode: str, sent: signal.Signals) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with Command("train", job, *MODES[mode], environment=alone) as command:
        run = run_below(tmp_path / "runs", command)
        assert command.until(lambda: last_step(run) >= 3, "step 3")
        started = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(sent)
        assert command.wait(ENDS_WITHIN_S) == 130, command.said()
        assert "Traceback" not in command.said()
        assert psutil.wait_procs(started, timeout=ENDS_WITHIN_S)[1] == []


def test_a_run_whose_ray_just_starts_ends_at_once(job: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with Command("train", job, environment=alone) as command:
        log = f"tokendrop-ray-*/ray/session_latest/logs/python-core-driver-*_{command.pid}.log"
        assert command.until(lambda: any(Path("/tmp").glob(log)), "its Ray")
        started = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGINT)
        assert command.wait(ENDS_WITHIN_S) == 130, command.said()
        assert command.said() == "connect  starting Ray on this machine\ntokendrop: stopped\n"
        assert psutil.wait_procs(started, timeout=ENDS_WITHIN_S)[1] == []


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_waits_for_nodes_leaves_the_cores_alone_and_ends_at_once(
    job: Path, request: pytest.FixtureRequest
) -> None:
    prepare(load_job(job))
    before_it = asked_for()
    environment = request.getfixturevalue("full_cluster")
    with Command("train", job, *MODES["schedule"], environment=environment) as command:
        assert command.until(lambda: "\nrun  " in f"\n{command.said()}", "the run")
        assert command.until(lambda: bool(asked_for() - before_it), "its request for room")
        driver = psutil.Process(command.pid)
        before, at = driver.cpu_times(), time.monotonic()
        time.sleep(3)
        after = driver.cpu_times()
        used = after.user + after.system - before.user - before.system
        assert used / (time.monotonic() - at) < 0.2
        command.send_signal(signal.SIGINT)
        assert command.wait(ENDS_WITHIN_S) == 130
        assert "Traceback" not in command.said()
    assert asked_for() <= before_it  # or nodes would come, and stay for minutes


def asked_for() -> set[str]:
    """Who has asked the cluster's autoscaler for room."""
    coordinator = get_or_create_autoscaling_coordinator()
    return ray.get(coordinator.__ray_call__.remote(lambda one: set(one._ongoing_reqs)))
