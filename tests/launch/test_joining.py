"""Jobs that are submitted to a local cluster whose nodes join and go under them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkouts import make_folder

JOBS = 10
AT_ONCE = 2
TRACKED = ("scaling.workers=2", "train.micro_batch=2", "track.uri=sqlite:///mlflow.db")


@pytest.fixture
def growing(tokendrop: Callable[..., subprocess.CompletedProcess[str]]) -> Iterator[dict[str, Any]]:
    """A cluster whose every worker wants a node of its own, which goes as soon as it is idle."""
    started = tokendrop("up", "--nodes", "0..4", "--cpus-per-node", "1", "--idle-timeout", "1", "--json")
    try:
        assert started.returncode == 0, started.stderr
        yield json.loads(started.stdout)
    finally:
        tokendrop("down")


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_nodes_that_join_leave_the_jobs_that_run_alone(
    tmp_path: Path, growing: dict[str, Any], environment: dict[str, str]
) -> None:
    checkout = make_folder(tmp_path / "user")
    without_source = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "tokendrop", "submit", "jobs/tiny.yaml", *TRACKED]
    for first in range(0, JOBS, AT_ONCE):
        names = [f"job{number}" for number in range(first, first + AT_ONCE)]
        submitted = [
            subprocess.Popen(
                [*command, f"run={name}", "--address", growing["dashboard"]],
                cwd=checkout,
                env=without_source | growing["environment"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in names
        ]
        for name, one in zip(names, submitted, strict=True):
            said, _ = one.communicate(timeout=200)
            assert one.returncode == 0, said
            assert "restart  " not in said
            assert (checkout / "runs" / name / "steps.parquet").exists()
    shutil.rmtree(checkout)
