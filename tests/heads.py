"""Ray heads of tests, as `ray start` makes them; also such on which nothing of tokendrop is installed."""

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from checkouts import MIB, dependencies_alone, free_ports, make_folder

TOKEN = secrets.token_hex(32)
_STARTS = 3


class Head(NamedTuple):
    """A Ray head whose Python can't import tokendrop, and the environment to submit to it from."""

    address: str
    folder: Path
    environment: dict[str, str]
    results: Path
    """Where jobs keep what they write that name relative paths."""

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )


class RayHead(NamedTuple):
    """The process of `ray start --head --block`, and its ports."""

    process: subprocess.Popen[bytes]
    gcs: int
    dashboard: int


@contextmanager
def ray_head(
    python: str | Path, folder: Path, environment: Mapping[str, str], options: Mapping[str, object]
) -> Iterator[RayHead]:
    """A Ray head at ports of its own, while the block runs.

    Args:
        folder: where Ray keeps its files; short, for the sockets in it.
        options: more of those that `ray start` takes.
    """
    dashboard, agent, metrics, client, gcs = free_ports(5)
    ports = {
        **{"port": gcs, "dashboard-port": dashboard, "dashboard-agent-listen-port": agent, "min-worker-port": 0},
        **{"metrics-export-port": metrics, "ray-client-server-port": client, "max-worker-port": 0},
    }
    options = {**ports, "object-store-memory": 150 * MIB, "temp-dir": folder, **options}
    command = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = {**environment, "RAY_USAGE_STATS_ENABLED": "0", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    process = _started(command, environment, folder)
    try:
        yield RayHead(process, gcs, dashboard)
    finally:
        end(process)


def _started(command: list[Any], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """A Ray head that is up; one that misses Ray's own deadlines, on a busy machine, ends and is started anew."""
    said = b""
    for _ in range(_STARTS):
        with tempfile.NamedTemporaryFile() as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            while process.poll() is None:
                if b"Ray runtime started" in Path(log.name).read_bytes():
                    return process
                time.sleep(0.2)
            said = Path(log.name).read_bytes()
        shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError(said.decode(errors="replace")[-2000:])


def end(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, and SIGKILL where that does not do."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a path that is short enough for Ray's sockets, while the block runs."""
    with tempfile.TemporaryDirectory(prefix="td", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def started_head(user: Path) -> Iterator[Head]:
    """`ray start --head` in its own folder, at its own ports, for a user who works in the folder `user`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    with short_folder() as temporary:
        python, results = dependencies_alone(temporary / "venv"), temporary / "results"
        path = f"{python.parent}{os.pathsep}{kept['PATH']}"
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        environment = kept | access | {"TOKENDROP_RESULTS": str(results), "PATH": path}
        with ray_head(python, temporary / "ray", environment, {"num-cpus": 3}) as head:
            address = f"http://127.0.0.1:{head.dashboard}"
            wait_for_nodes(address)
            yield Head(address, make_folder(user), environment, results)


def wait_for_nodes(address: str, count: int = 1, *, timeout_s: float = 180.0) -> None:
    """Until the dashboard answers and knows of so many nodes that are up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            asked = urllib.request.Request(
                f"{address}/nodes?view=summary", headers={"Authorization": f"Bearer {TOKEN}"}
            )
            with urllib.request.urlopen(asked, timeout=5) as answer:
                nodes = json.load(answer)["data"]["summary"]
                if sum(node.get("raylet", {}).get("state") == "ALIVE" for node in nodes) >= count:
                    return
        except (OSError, ValueError):
            pass
        time.sleep(0.3)
    raise TimeoutError(f"no {count} nodes of the Ray head at {address} after {timeout_s} s")
