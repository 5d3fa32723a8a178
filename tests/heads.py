"""A Ray head with a dashboard, on which nothing of tokendrop is installed."""

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from checkouts import MIB, dependencies_alone, free_ports, make_folder

TOKEN = secrets.token_hex(32)


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
            timeout=120,
            check=False,
        )


@contextmanager
def started_head(user: Path) -> Iterator[Head]:
    """`ray start --head` in its own folder, at its own ports, for a user who works in the folder `user`."""
    temporary = Path(tempfile.mkdtemp(prefix="td", dir="/tmp"))  # Ray's sockets want a short path
    python = dependencies_alone(temporary / "venv")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "TOKENDROP_RESULTS": str(temporary / "results"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PATH": f"{python.parent}{os.pathsep}{environment['PATH']}",
    }
    dashboard, agent, metrics, client, gcs = free_ports(5)
    process = subprocess.Popen(
        [
            *(
                python,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--block",
                "--no-monitor",
                "--num-cpus=3",
            ),
            *(f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
            *(f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}"),
            *("--min-worker-port=0", "--max-worker-port=0"),
            *(f"--object-store-memory={150 * MIB}", f"--temp-dir={temporary / 'ray'}"),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_for_nodes(address)
        folder = make_folder(user)
        yield Head(address, folder, environment, temporary / "results")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def wait_for_nodes(address: str, timeout_s: float = 60.0) -> None:
    """Until the dashboard answers and knows of its node."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            asked = urllib.request.Request(
                f"{address}/nodes?view=summary", headers={"Authorization": f"Bearer {TOKEN}"}
            )
            with urllib.request.urlopen(asked, timeout=5) as answer:
                if json.load(answer)["data"]["summary"]:
                    return
        except (OSError, ValueError):
            pass
        time.sleep(0.3)
    raise TimeoutError(f"no Ray head at {address} after {timeout_s} s")
