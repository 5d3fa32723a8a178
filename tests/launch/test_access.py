"""Who reaches the Rays that are started here, and what stays of them."""

import ipaddress
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from kills import Command, last_step, run_below
from tokendrop.launch.cleanup import FOLDER_VARIABLE, processes_on

pytestmark = pytest.mark.ray

GONE_WITHIN_S = 10
INTRUDER = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
print("let in", ray.get(ray.remote(num_cpus=0)(lambda: 42).remote()))
"""


HOST = """
import os, sys
from tokendrop.launch.loopback import close_to_others
close_to_others()
import ray
from tokendrop.launch.cluster import connect
connect(cpus=1)
print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)
sys.stdin.read()
"""


def intrude(address: str, **access: str) -> str:
    """What a process of another user gets to see that knows the address, and has this access to it."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address.startswith("127.0.0.1:") else {}
    command = [sys.executable, "-c", INTRUDER, address]
    done = subprocess.run(
        command, env=others | loopback | access, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_ray_of_one_process_lets_nobody_in_without_its_token() -> None:
    """A Ray of its own: where it does not outlive intruders, this test fails, and not the session whose Ray it is."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOST], env=alone(), **pipes) as host:
        assert host.stdin
        assert host.stdout
        address, token = host.stdout.readline().split()
        assert "let in 42" in intrude(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        for access in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token[::-1]}):
            said = intrude(address, **access)
            assert "let in" not in said
            assert "ConnectionError: Failed to connect to Ray cluster" in said
        assert host.poll() is None
        host.stdin.close()


@pytest.mark.long
def test_a_local_cluster_lets_nobody_in_without_its_token(cluster: dict[str, Any]) -> None:
    access = {name: value for name, value in cluster["environment"].items() if name.startswith("RAY_AUTH")}
    token = Path(access["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert "let in 42" in intrude(cluster["address"], **access)
    assert "let in" not in intrude(cluster["address"], RAY_AUTH_MODE="disabled")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{cluster['dashboard']}/api/jobs/")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    return tiny_job(
        tmp_path, [corpus], data={"tokenizer": str(tokenizer)}, train={"length": "100000 steps", "precision": "fp32"}
    )


def alone() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def listening(process: psutil.Process) -> dict[str, set[str]]:
    """The addresses that a process and its children listen at, and the names of those that do."""
    found: dict[str, set[str]] = {}
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(connection.laddr.ip, set()).add(one.name())
    return found


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def folders_of(command: Command) -> set[str]:
    """The folders of the Rays that a command has started."""
    children = psutil.Process(command.pid).children(recursive=True)
    return {one.environ()[FOLDER_VARIABLE] for one in children if "raylet" in one.name()}


@pytest.mark.long
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT])
def test_a_run_is_reached_from_this_machine_alone_and_leaves_nothing(
    job: Path, tmp_path: Path, ended_by: signal.Signals
) -> None:
    two = ("scaling.workers=2", "train.micro_batch=2")
    with Command("train", job, *two, environment=alone() | {"RAY_AUTH_MODE": "disabled"}) as command:
        run = run_below(tmp_path / "runs", command)
        assert command.until(lambda: last_step(run) >= 1, "step 1")
        outside = {
            name
            for ip, names in listening(psutil.Process(command.pid)).items()
            if not is_loopback(ip)
            for name in names
        }
        assert outside <= {"ray::RayTrainWorker"}  # the store by which torch's workers find each other
        (folder,) = folders_of(command)
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        command.send_signal(ended_by)
        command.wait(30)
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := processes_on(folder)) or Path(folder).exists():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def test_only_what_a_ray_started_is_ended_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    reader = subprocess.Popen(["tail", "-f", log], stdout=subprocess.DEVNULL)
    of_ray = subprocess.Popen(["sleep", "60"], env={**os.environ, FOLDER_VARIABLE: str(tmp_path)})
    try:
        assert {one.pid for one in processes_on(str(tmp_path))} == {of_ray.pid}
    finally:
        for one in (reader, of_ray):
            one.kill()
            one.wait()


def test_a_folder_for_ray_that_can_not_be_made_is_named(job: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tokendrop", "prepare", str(job)],
        env=alone() | {"RAY_TMPDIR": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last == "tokendrop: RAY_TMPDIR: can't make a folder for Ray below /nonexistent (No such file or directory)"
