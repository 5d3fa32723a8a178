"""The local cluster: nodes come and go as they are needed, and nothing is left but the other Rays."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokendrop.cli.main import main
from tokendrop.launch.local_cluster import find, processes, stop
from tokendrop.launch.local_head import MARK, ClusterSize, LocalCluster
from tokendrop.launch.local_nodes import count_nodes

ROOT = Path(__file__).parents[2]

TWO_WORKERS = """
import sys, ray

ray.init(log_to_driver=False)

@ray.remote(num_cpus=1, num_gpus=1)
class Worker:
    def node(self):
        return ray.get_runtime_context().get_node_id()

workers = [Worker.remote() for _ in range(2)]
from tokendrop.config.load import load_job
from tokendrop.launch.room import check_room
check_room(load_job("jobs/pretrain/quickstart.yaml", ["train.micro_batch=1", "scaling.workers=8"]))
print(*ray.get([worker.node.remote() for worker in workers]), flush=True)
sys.stdin.read()
"""

LINK = """
from tokendrop.bench.node_link import measure_node_link
from tokendrop.config.run import ScalingConfig

link, backend = measure_node_link(ScalingConfig(cpus_per_worker=1), log=print, values=2**20)
print(backend, link.bytes_per_s, link.gather_bytes_per_s, link.latency_s)
"""


def started_cluster(mark: str, folder: Path) -> LocalCluster:
    size = ClusterSize(min_nodes=0, max_nodes=1, cpus_per_node=1, gpus_per_node=0, idle_timeout_s=1)
    return LocalCluster(
        mark=mark, address="127.0.0.1:1", dashboard="http://127.0.0.1:2", folder=str(folder), access={}, size=size
    )


def until(done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--nodes many", "--nodes many: want a number or a range"),
        ("--nodes 1...4", "--nodes 1...4: want a number or a range"),
        ("--nodes 4..1", "--nodes 4..1: want a range that goes up"),
        ("--nodes 0", "--nodes 0: want a range that goes up and ends at 1 or more"),
        ("--nodes=-1..2", "--nodes -1..2: want a range that goes up"),
        ("--cpus-per-node 0", "--cpus-per-node 0: want 1 to 1,024"),
        ("--gpus-per-node=-1", "--gpus-per-node -1: want 0 to 1,024"),
        ("--nodes 1..99999999", "--nodes 1..99999999: want a range that goes up and ends at 1 or more, 64 at most"),
        ("--cpus-per-node 1000000000", "--cpus-per-node 1e+09: want 1 to 1,024"),
        ("--gpus-per-node 1025", "--gpus-per-node 1025: want 0 to 1,024"),
        ("--idle-timeout nan", "--idle-timeout nan: want 1 to 1,000,000"),
        ("--idle-timeout 1e18", "--idle-timeout 1e+18: want 1 to 1,000,000"),
        ("--port 0", "--port 0: want a port from 1 to 65,535 that is free"),
        ("--port 65536", "--port 65536: want a port from 1 to 65,535 that is free"),
    ],
)
def test_a_size_that_makes_no_sense_is_one_sentence(
    state: Path, capsys: pytest.CaptureFixture[str], arguments: str, complaint: str
):
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "up", *arguments.split()])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tokendrop: {complaint}")
    assert said.count("\n") == 1
    assert not state.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"mark": "1"}', None])
def test_a_file_that_outlived_its_cluster_is_no_cluster_and_goes_away(state: Path, text: str | None):
    stale = started_cluster("0" * 16, state.parent / "ray")
    state.parent.mkdir(exist_ok=True)
    state.write_text(json.dumps(asdict(stale)) if text is None else text)

    assert find() is None
    assert stop() is None
    assert text is not None or not state.exists()
    state.unlink(missing_ok=True)


def test_a_clusters_processes_are_those_of_its_sessions_and_no_others(tmp_path: Path):
    sleep = f"{sys.executable} -c 'import time; time.sleep(60)'"
    forget = f"env -u {MARK} {sleep} & {sleep}"  # the first has lost the mark, as Ray's agents do

    def begin(command: str, mark: str | None) -> subprocess.Popen[bytes]:
        environment = os.environ | ({MARK: mark} if mark else {})
        return subprocess.Popen(["sh", "-c", command], env=environment, start_new_session=True)

    begun = [begin(forget, "ours"), begin(forget, "other"), begin(sleep, None)]
    ours, *others = ({process.pid} for process in begun)
    try:
        until(lambda: all(len(psutil.Process(one.pid).children()) == 2 for one in begun[:2]), 20)
        for one, group in zip(begun, (ours, *others), strict=True):
            group.update(child.pid for child in psutil.Process(one.pid).children(recursive=True))
        assert {one.pid for one in processes(started_cluster("ours", tmp_path))} == ours
        assert {one.pid for one in processes(started_cluster("nobody", tmp_path))} == set()
    finally:
        for one in begun:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@pytest.mark.ray
def test_an_up_that_is_terminated_leaves_nothing(environment: dict[str, str], state: Path):
    command = [sys.executable, "-m", "tokendrop", "cluster", "up", "--nodes", "1"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as starting:
        try:
            until(lambda: (known := find()) is not None and len(processes(known)) > 1, 60)
            known = find()
            starting.terminate()
            assert starting.wait(60) == 128 + signal.SIGTERM
            assert known is not None
            assert processes(known) == []
            assert not state.exists()
        finally:
            stop()


@pytest.mark.chaos
@pytest.mark.ray
def test_nodes_come_when_they_are_asked_for_and_go_when_they_are_idle(tokendrop, cluster, environment, state: Path):
    running = find()
    assert running is not None

    def status() -> dict[str, Any]:
        return json.loads(tokendrop("status", "--json").stdout)

    def workers() -> list[dict[str, Any]]:
        return [node for node in status()["nodes"] if node["role"] == "worker"]

    assert (workers(), count_nodes(running.nodes)) == ([], (0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", TWO_WORKERS],
        env=environment | cluster["environment"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        homes = job.stdout.readline().split()
        assert {node["id"] for node in workers()} == set(homes)
        assert count_nodes(running.nodes) == (2, 0)
        assert [node["resources"] for node in workers()] == [{"CPU": 2, "GPU": 1}] * 2
        until(lambda: status()["used"] == {"CPU": 2, "GPU": 2}, 10)  # the autoscaler's view is a second old
        job.stdin.close()
        assert job.wait(30) == 0
    until(lambda: workers() == [], cluster["idle_timeout_s"] + 30)
    until(lambda: count_nodes(running.nodes) == (0, 0), 10)


@pytest.mark.long
@pytest.mark.ray
def test_the_link_between_two_nodes_is_measured_and_they_are_free_afterwards(
    tokendrop, cluster, environment, state: Path
):
    """Between two, though one has room for both workers."""
    done = subprocess.run(
        [sys.executable, "-c", LINK],
        env=environment | cluster["environment"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    backend, *figures = done.stdout.split()[-4:]
    assert backend == "gloo"
    per_s, gathered_per_s, latency_s = map(float, figures)
    assert 1e6 < min(per_s, gathered_per_s) <= max(per_s, gathered_per_s) < 1e12
    assert 0 < latency_s < 1
    running = find()
    assert running is not None
    assert len([path for path in running.nodes.iterdir() if path.is_dir()]) == 2
    until(lambda: json.loads(tokendrop("status", "--json").stdout)["used"].get("CPU", 0) == 0, 30)


@pytest.mark.long
@pytest.mark.ray
def test_a_second_cluster_is_refused_by_one_sentence(tokendrop, cluster):
    refused = tokendrop("up")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"tokendrop: a local cluster is up already at {cluster['address']}; ")
    assert refused.stderr.count("\n") == 1


@pytest.mark.ray
def test_down_leaves_no_process_and_every_other_ray(tokendrop, cluster, ray_cluster, state: Path):
    import ray

    @ray.remote
    class Other:
        def answer(self) -> int:
            return 42

    other = Other.remote()
    assert ray.get(other.answer.remote()) == 42
    running = find()
    assert running is not None
    assert len(processes(running)) > 5

    down = tokendrop("down")

    assert (down.returncode, down.stdout) == (0, f"stopped {cluster['address']}\n")
    assert processes(running) == []
    assert list(state.parent.iterdir()) == []
    assert ray.get(other.answer.remote()) == 42
    assert json.loads(tokendrop("status", "--json").stdout) == {"up": False}
    assert tokendrop("down").stdout == "no local cluster was up\n"
