"""Nodes of an autoscaling cluster follow the plan of a run, and go when it has no use for them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corpora import documents, tiny_job, write_corpus
from kills import Command, audited, last_step, run_below
from tokendrop.track.journal import MetricsTail, read_steps
from tokendrop.track.run_folder import read_attempts
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
]

STEPS, UP, DOWN = 2100, 600, 1500  # two workers from UP on, one from DOWN on
ENDLESS = 100_000  # steps of a run that loses its node: a fast machine must not come to its end before
CORES_OF_A_NODE = 1
LAG_S = 6.0  # of the autoscaler's view, and for workers to change


@dataclass(frozen=True, slots=True)
class Seen:
    """The cluster at a moment of a run."""

    time: float
    step: int
    nodes: int
    used: dict[str, float]
    requested: list[Any]


def job_of(folder: Path) -> Path:
    segments = [{"from": f"{start} steps", "workers": workers} for start, workers in ((0, 1), (UP, 2), (DOWN, 1))]
    return tiny_job(
        folder,
        [write_corpus(folder / "corpus.jsonl", documents(300))],
        model={"kind": "gpt", "layers": 4, "width": 96, "heads": 2, "sequence_length": 128, "vocab_size": 320},
        train={"length": f"{STEPS} steps", "global_batch": 4, "micro_batch": 2, "peak_lr": 1e-3, "precision": "fp32"},
        checkpoint={"every": "100%"},
        evaluate={"every": "100%", "sequences": 4},
        scaling={
            "mode": "schedule",
            "segments": segments,
            "cpus_per_worker": CORES_OF_A_NODE,
            "lead_s": 60,
            "patience_s": 180,  # of a busy machine
        },
    )


@pytest.mark.chaos
def test_nodes_follow_the_plan_and_go_when_they_are_free(
    tmp_path: Path, tokendrop: Callable[..., Any], cluster: dict[str, Any], environment: dict[str, str]
) -> None:
    with Command("train", job_of(tmp_path), environment=environment | cluster["environment"]) as command:
        run = run_below(tmp_path / "runs", command)
        seen: list[Seen] = []

        def look() -> bool:
            now = json.loads(tokendrop("status", "--json").stdout)
            nodes = sum(node["role"] == "worker" for node in now["nodes"])
            seen.append(Seen(time.time(), last_step(run), nodes, now["used"], now["requested"]))
            time.sleep(3)  # to ask takes a core for a second, from the workers
            return False

        command.until(look, "the end of the run")
        command.finish()
    ended = time.time()
    while seen[-1].nodes and time.time() < ended + cluster["idle_timeout_s"] + 30:
        look()
    assert [row["world_size"] for row in read_steps(run)] == [1] * UP + [2] * (DOWN - UP) + [1] * (STEPS - DOWN)

    for start, stop, workers in ((0, UP, 1), (UP, DOWN, 2), (DOWN, STEPS, 1)):
        inside = [one for one in seen if start < one.step < stop]
        settled = [one for one in inside if inside[0].time + LAG_S < one.time < inside[-1].time - LAG_S]
        assert settled, (start, inside)
        assert {one.used["CPU"] for one in settled} <= {CORES_OF_A_NODE * workers}
        if workers == 2:
            assert 2 in {one.nodes for one in inside}
            assert {one.nodes for one in settled} <= {2}
            assert all(not one.requested for one in settled)
    gone = next(one.time for one in seen if one.step > DOWN and one.nodes <= 1)
    free = next(one.time for one in seen if one.step > DOWN)
    assert gone - free <= cluster["idle_timeout_s"] + 30


def take_back_the_node_at_work(tokendrop: Callable[..., Any], environment: dict[str, str]) -> None:
    (node,) = (one for one in json.loads(tokendrop("status", "--json").stdout)["nodes"] if one["used"].get("CPU"))
    notice = ("DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a spot machine is taken back")
    drain = ["drain-node", f"--node-id={node['id']}", "--reason", *notice, "--deadline-remaining-seconds=120"]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *drain], env=environment, check=True)


def test_a_node_that_is_taken_back_is_left_in_time_with_all_that_was_done(
    tmp_path: Path, tokendrop: Callable[..., Any], cluster: dict[str, Any], environment: dict[str, str]
) -> None:
    mine = environment | cluster["environment"]
    alone = ("scaling.segments=[{from: 0%, workers: 1}]", f"train.length={ENDLESS} steps")
    with Command("train", job_of(tmp_path), *alone, environment=mine) as command:
        run = run_below(tmp_path / "runs", command)
        assert command.until(lambda: last_step(run) >= 50, "step 50")
        take_back_the_node_at_work(tokendrop, mine)
        assert command.until(lambda: len(read_attempts(run)[0]) == 2, "other workers")
        resumed = last_step(run)
        assert command.until(lambda: last_step(run) >= resumed + 50, "steps of other workers")
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 128 + signal.SIGINT
        said = command.said()
    attempts, pauses = read_attempts(run)
    assert len(attempts) == 2
    (pause,) = pauses
    assert (pause["from"], pause["to"]) == (1, 1)
    assert 50 <= pause["resize_at"] == attempts[1]["attempt_from"]
    done = [line["step"] for line in MetricsTail(run).read(limit=-1) if "step" in line]
    assert done == list(range(1, done[-1] + 1))  # none twice
    assert audited(run) == (0, 0)
    assert "a worker was lost" not in said


FIXED = ("scaling.mode=fixed", "scaling.segments=[]")
PER_SEGMENT = ("scaling.mode=fit_per_segment", "scaling.segments=[{from: 0%, workers: 1}]")


@pytest.mark.long
@pytest.mark.parametrize("mode", [FIXED, PER_SEGMENT], ids=["fixed", "fit_per_segment"])
def test_a_run_without_a_policy_saves_itself_once_where_its_node_is_taken_back_and_goes_on(
    tmp_path: Path, tokendrop: Callable[..., Any], cluster: dict[str, Any], environment: dict[str, str], mode: Any
) -> None:
    mine = environment | cluster["environment"]
    fixed = (*mode, f"train.length={ENDLESS} steps", "checkpoint.every=100%")
    with Command("train", job_of(tmp_path), *fixed, environment=mine) as command:
        run = run_below(tmp_path / "runs", command)
        assert command.until(lambda: last_step(run) >= 20, "step 20")
        assert committed_step(run / CHECKPOINTS) == 0
        before = last_step(run)
        take_back_the_node_at_work(tokendrop, mine)
        assert command.until(lambda: committed_step(run / CHECKPOINTS) >= before, "a checkpoint")
        saved = committed_step(run / CHECKPOINTS)
        assert command.until(lambda: last_step(run) >= saved + 50, "steps after it")
        assert committed_step(run / CHECKPOINTS) == saved
        assert len(read_attempts(run)[0]) == 1  # before the node's deadline


@pytest.mark.long
def test_gpus_that_ray_counts_and_nobody_has_are_told_of_in_one_sentence(
    tmp_path: Path, cluster: dict[str, Any], environment: dict[str, str]
) -> None:
    booked = ("scaling.mode=fixed", "scaling.segments=[]", "scaling.gpus_per_worker=1", "train.length=3 steps")
    with Command("train", job_of(tmp_path), *booked, environment=environment | cluster["environment"]) as command:
        assert command.wait(200) == 2, command.said()
        said = command.said().splitlines()[-1]
        assert said.startswith("tokendrop: scaling.gpus_per_worker: Ray counts GPUs on "), said
        assert "Traceback" not in command.said()
