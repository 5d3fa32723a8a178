"""A run that follows its plan while workers, nodes, drivers and the tracking server are killed under it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from kills import LONGEST_WAIT_S, Command, audited, last_step, processes_named, run_below
from tokendrop.config.load import load_job
from tokendrop.launch.local_head import free_port
from tokendrop.models.build import build_model
from tokendrop.track.journal import read_steps
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.reader import load_weights

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(3600)]

LEFT = """
import json, ray
from ray.util.state import list_actors, list_placement_groups
ray.init(log_to_driver=False)
actors = [one.class_name for one in list_actors(filters=[("state", "=", "ALIVE")])]
groups = [one.state for one in list_placement_groups() if one.state != "REMOVED"]
print(json.dumps({"actors": actors, "groups": groups, "used": ray.cluster_resources().get("CPU", 0)
                  - ray.available_resources().get("CPU", 0)}))
"""
VICTIMS = {"workers": 5, "nodes": 2, "drivers": 2, "MLflow servers": 1}  # and how often each
# Ray Data's and Ray Train's, one of each a cluster; and of a run that was killed as it started, Ray Train's own, which
# can't end itself
OF_RAY = {"_StatsActor", "_AutoscalingCoordinatorActor", "TrainStateActor", "PlacementGroupCleaner"}


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of processes on a local cluster of two nodes, and a third where one dies, with a CPU each."""
    folder = tempfile.mkdtemp(prefix="td", dir="/tmp")  # short, for Ray's sockets
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"RAY_TMPDIR": folder}
    up = ("--nodes", "2..3", "--cpus-per-node", "1", "--idle-timeout", "5", "--json")
    started = cluster_command("up", *up, environment=mine)
    try:
        yield mine | json.loads(started)["environment"]
    finally:
        cluster_command("down", environment=mine)
        shutil.rmtree(folder)


def cluster_command(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "tokendrop", "cluster", *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


class Tracking:
    """An MLflow server that is killed and comes back."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(5731), folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + LONGEST_WAIT_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            time.sleep(0.2)
        raise AssertionError("waited for MLflow's server")


@pytest.fixture
def tracking(tmp_path: Path) -> Iterator[Tracking]:
    server = Tracking(tmp_path)
    server.wait()
    yield server
    server.kill()


def job_of(folder: Path, steps: int, uri: str) -> Path:
    """A run of two workers, now and then one."""
    corpus = write_corpus(folder / "corpus.jsonl", documents(600))
    turns = [{"from": f"{start} steps", "workers": 1 + number % 2} for number, start in enumerate(range(0, steps, 120))]
    return tiny_job(
        folder,
        [corpus],
        data={"tokenizer": str(byte_tokenizer(folder / "tokenizer.json"))},
        train={
            "length": f"{steps} steps",
            "global_batch": 4,
            "micro_batch": 2,
            "peak_lr": 1e-3,
            "precision": "fp64",
        },
        drop={"method": "random_ltd", "schedule": {"kind": "linear", "start": 8, "until": "70%", "increment": 4}},
        checkpoint={"every": "20 steps"},
        evaluate={"every": "100 steps", "sequences": 4},
        scaling={
            "mode": "schedule",
            "segments": turns,
            "cpus_per_worker": 1,
            "max_restarts": 10_000,
            "patience_s": 2,
            "lead_s": 10,
        },
        track={"uri": uri},
    )


def draw(chance: random.Random) -> str:
    return chance.choices(list(VICTIMS), VICTIMS.values())[0]


def strike(victim: str, folder: str, chance: random.Random) -> bool:
    """SIGKILL a worker of Ray Train, or a node that is not the head; false where there is none just now."""
    if victim == "workers":
        victims = [one for one in processes_named("ray::RayTrainWorker") if _is_below(one, folder)]
    else:
        victims = [one for one in processes_named("raylet/raylet", folder) if "--head" not in one.cmdline()]
    with suppress(psutil.NoSuchProcess, IndexError):
        chance.choice(victims).kill()
        return True
    return False


def _is_below(process: psutil.Process, folder: str) -> bool:
    with suppress(psutil.Error):
        return any(folder in " ".join(parent.cmdline()) for parent in process.parents())
    return False


def weights(config: Any, run: Path) -> dict[str, torch.Tensor]:
    model = build_model(config.model, seed=0).double()
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    return dict(model.state_dict())


def left_behind(environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", LEFT], env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_under_fire_ends_with_the_weights_of_one_in_peace(tmp_path, environment, tracking, kills, chance, tally):
    job = job_of(tmp_path, steps=120 + 120 * kills, uri=tracking.uri)
    config = load_job(job)
    peaceful = tmp_path / "peaceful"
    one = ("scaling.mode=fixed", "scaling.segments=[]", "scaling.workers=1", "track.uri=null")
    command = Command("train", job, *one, f"runs_folder={peaceful}", environment=environment)
    expected = run_below(peaceful, command)
    command.finish()

    runs = tmp_path / "runs"
    command = Command("train", job, environment=environment)
    run = run_below(runs, command)
    for _ in range(kills):
        goal = last_step(run) + chance.randint(1, 40)
        assert command.until(lambda goal=goal: last_step(run) >= goal, f"step {goal}"), "over before all was killed"
        victim = draw(chance)
        while victim in {"workers", "nodes"} and not strike(victim, environment["RAY_TMPDIR"], chance):
            victim = draw(chance)
        if victim == "drivers":
            command.kill_all()
            command = Command("train", "--resume", run, environment=environment)
        elif victim == "MLflow servers":
            tracking.kill()
            tracking.start()
        tally[victim] += 1
    tracking.wait()
    command.finish(patience_s=LONGEST_WAIT_S + 20 * kills)  # the more kills, the longer the run

    assert audited(run) == (0, 0)
    losses = [[row["loss"] for row in read_steps(path)] for path in (run, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-10)
    for key, value in weights(config, expected).items():
        torch.testing.assert_close(weights(config, run)[key], value, rtol=1e-10, atol=1e-10)
    deadline = time.monotonic() + 60
    while (left := left_behind(environment))["groups"] or not OF_RAY.issuperset(left["actors"]):
        assert time.monotonic() < deadline, {**left, "actors": sorted({*left["actors"]} - OF_RAY)}
        time.sleep(1)
