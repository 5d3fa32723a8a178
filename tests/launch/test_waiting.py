"""Nothing is waited for in silence, nor for ever."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from kills import Command, last_step, run_below
from tiny import experiment
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.launch.room import count_places, resources_of, waiting_text

SAID_WITHIN_S, ASKED_WITHIN_S, REFUSED_WITHIN_S = 5, 50, 30
BY_PLAN = ("scaling.mode=schedule", "scaling.segments=[{from: 0%, workers: 1}]")
LONG = ("train.length=100000 steps", "train.precision=fp32")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    return tiny_job(tmp_path, [corpus], data={"tokenizer": str(byte_tokenizer(tmp_path / "tokenizer.json"))})


@pytest.fixture
def prepared(job: Path, ray_cluster: None) -> Path:
    prepare(load_job(job))
    return job


@pytest.mark.ray
@pytest.mark.parametrize("mode", [(), pytest.param(BY_PLAN, marks=[pytest.mark.schedule, pytest.mark.long])])
def test_a_run_that_waits_for_cores_says_so(
    prepared: Path, full_cluster: dict[str, str], mode: tuple[str, ...]
) -> None:
    with Command("train", prepared, *mode, environment=full_cluster) as command:
        assert command.until(lambda: "\nstart    1 worker of 1 CPU each\n" in command.said(), "the start")
        started = time.monotonic()
        assert command.until(lambda: "\nwaiting  for " in command.said(), "a word")
        assert time.monotonic() - started < SAID_WITHIN_S + 1
        # Ray Train itself may take longer until it asks for room
        assert command.until(lambda: "\nwaiting  for room: " in command.said(), "room", patience_s=ASKED_WITHIN_S)
        assert "waiting  for room: 1 worker of 1 CPU each; 0 of 4 CPUs are free on 1 node\n" in command.said()
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 130


@pytest.mark.ray
def test_a_run_that_waits_for_a_kind_of_node_names_it(ray_cluster: None) -> None:
    from ray.util import placement_group, remove_placement_group

    each = resources_of(experiment(scaling={"accelerator": "B9000", "market": "spot", "gpus_per_worker": 1}).scaling)
    waits = placement_group([each] * 2)
    try:
        kinds, who = "accelerator_type:B9000, market:spot", "2 workers of 2 CPUs and 1 GPU (B9000, spot) each"
        assert waiting_text(2, each) == f"waiting  for a node with {kinds}: {who}"
    finally:
        remove_placement_group(waits)


@given(
    nodes=st.lists(st.fixed_dictionaries({"CPU": st.integers(0, 16)}, optional={"GPU": st.integers(0, 4)}), max_size=5),
    cpus=st.integers(1, 8),
    gpus=st.integers(0, 3),
)
def test_places_are_those_of_each_node_alone(nodes: list[dict[str, float]], cpus: int, gpus: int) -> None:
    placed = 0
    for node in nodes:
        left = {"CPU": node["CPU"], "GPU": node.get("GPU", 0)}
        while left["CPU"] >= cpus and left["GPU"] >= gpus:
            left = {"CPU": left["CPU"] - cpus, "GPU": left["GPU"] - gpus}
            placed += 1
    each = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    assert count_places(nodes, each) == placed
    assert math.isfinite(placed)


@pytest.mark.long
@pytest.mark.ray
def test_an_address_that_takes_connections_and_never_answers_is_refused(job: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "tokendrop", "train", str(job)],
            env={**os.environ, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert time.monotonic() - start < REFUSED_WITHIN_S
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"tokendrop: RAY_ADDRESS: no Ray cluster lets this process in at {address} (it takes conn")
    assert "Traceback" not in ended.stderr


@pytest.mark.long
@pytest.mark.ray
def test_a_run_whose_head_is_killed_ends_and_says_how_to_go_on(job: Path, tmp_path: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with Command("train", job, *LONG, "checkpoint.every=1 steps", environment=alone) as command:
        run = run_below(tmp_path / "runs", command)
        assert command.until(lambda: last_step(run) >= 3, "step 3")
        (head,) = [one for one in psutil.Process(command.pid).children(recursive=True) if one.name() == "gcs_server"]
        head.kill()
        assert command.wait(20) == 1
        last = command.said().splitlines()[-1]
        gone = r"tokendrop: the Ray head at 127\.0\.0\.1:\d+ is gone \(.*\); go on with "
        assert re.fullmatch(rf"{gone}'tokendrop train --resume {run}'", last)
    with Command("train", "--resume", run, environment=alone) as command:
        assert command.until(lambda: "\nstart    " in command.said(), "the resumed run's start")
