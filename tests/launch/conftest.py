"""A local cluster for the tests of a file: one whose nodes come and go."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heads import Head, started_head
from stores import S3, s3_server

ROOT = Path(__file__).parents[2]
IDLE_TIMEOUT_S = 2


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the cluster of these tests keeps its state: short, for Ray's sockets, and not the user's own."""
    path = Path(tempfile.mkdtemp(prefix="td", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    """A user's, without what this session's own Ray has put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"RAY_TMPDIR": str(folder), "PYTHONPATH": str(ROOT / "platform")}


@pytest.fixture
def state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state file, for calls within this process."""
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    return folder / f"tokendrop-{os.getuid()}" / "cluster.json"


@pytest.fixture(scope="module")
def tokendrop(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tokendrop", "cluster", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)

    return run


@pytest.fixture(scope="module")
def cluster(
    tokendrop: Callable[..., subprocess.CompletedProcess[str]], request: pytest.FixtureRequest
) -> Iterator[dict[str, Any]]:
    """A cluster of up to two nodes, each with a GPU that it has not; what `up` said of it."""
    cores = getattr(request.module, "CORES_OF_A_NODE", 2)
    size = ("--nodes", "0..2", "--cpus-per-node", str(cores), "--gpus-per-node", "1")
    started = tokendrop("up", *size, "--idle-timeout", str(IDLE_TIMEOUT_S), "--json")
    try:
        assert started.returncode == 0, started.stderr
        yield json.loads(started.stdout) | {"idle_timeout_s": IDLE_TIMEOUT_S}
    finally:
        tokendrop("down")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A Ray head for the tests of a file, with three cores and a dashboard."""
    with started_head(tmp_path_factory.mktemp("user") / "my work") as head:
        yield head


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """A store, and below the test's folder the copies that this machine keeps of runs in it."""
    for name, value in (S3.ENVIRONMENT | {"TOKENDROP_STORED_RUNS": str(tmp_path / "here")}).items():
        monkeypatch.setenv(name, value)
    with s3_server() as server:
        yield server


@pytest.fixture
def full_cluster(ray_cluster: None) -> Iterator[dict[str, str]]:
    """The environment of a process on a cluster whose cores another run has."""
    import ray

    @ray.remote(num_cpus=4)
    class Other:
        def is_there(self) -> bool:
            return True

    other = Other.remote()
    ray.get(other.is_there.remote(), timeout=120)  # pyright: ignore[reportAttributeAccessIssue]
    yield {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ray.kill(other)
