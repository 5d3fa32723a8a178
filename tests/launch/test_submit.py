"""Whole jobs, submitted to a head that has the dependencies alone."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from checkouts import MIB, free_ports, make_folder
from tokendrop.track.run_folder import latest_checkpoint, open_run_folder
from tokendrop.train.committed import read_meta

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


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """`ray start --head` in its own folder, at its own ports."""
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
        folder = make_folder(tmp_path_factory.mktemp("user") / "my work")
        yield Head(address, folder, environment, temporary / "results")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def dependencies_alone(folder: Path) -> Path:
    """A Python with the packages of this one, less those installed as a link to their source: tokendrop."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a line of a .pth file adds a folder, but not what the .pth files in that folder add
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(installed))
    python = folder / "bin" / "python"
    # -E: a Ray that this session started has put the source tree on PYTHONPATH
    command = [python, "-E", "-c", "import tokendrop"]
    found = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    if "No module named 'tokendrop'" not in found.stderr:
        pytest.skip("tokendrop is installed here as a copy, not with `pip install -e`")
    return python


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


@pytest.mark.ray
def test_ray_job_submit_needs_nothing_but_the_dependencies(head: Head):
    command = f"python jobs/run.py train jobs/tiny.yaml data.corpus=[{json.dumps(str(head.folder / 'text'))}]"
    done = head.run(
        *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.address),
        *("--working-dir", ".", "--", *command.split(" ", 4)),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    run = Path(next(line for line in done.stdout.splitlines() if line.startswith("run folder")).split(None, 2)[2])
    assert run.parent == head.results / "runs"
    assert f"results  {run.parent}; TOKENDROP_RESULTS in the environment" in done.stdout
    assert "core_worker.cc" not in done.stdout + done.stderr  # which Ray's own complaints name
    assert read_meta(latest_checkpoint(run))["name"] == "tiny"
    assert not (head.folder / "runs").exists()


def test_a_python_without_the_dependencies_is_told_what_to_do():
    script = Path(__file__).parents[2] / "jobs" / "run.py"
    bare = [sys.executable, "-I", "-S", script, "plan", "jobs/tiny.yaml"]  # the standard library alone
    done = subprocess.run(bare, capture_output=True, text=True, check=False)

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"tokendrop: {sys.executable} has no package yaml: run `ray start`")


@pytest.mark.ray
def test_a_submitted_run_lies_where_the_user_is(head: Head):
    done = head.run(
        *(sys.executable, "-m", "tokendrop", "submit", "jobs/tiny.yaml", "name=mine"),
        *("--address", head.address, "--json"),
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["exit_code"]) == ("SUCCEEDED", 0)
    run = Path(result["result"]["run"])
    assert run.parent == head.folder / "runs"
    assert latest_checkpoint(run).is_dir()
    config, data = open_run_folder(run)
    assert config.name == "mine"
    assert data.is_relative_to(head.folder / "runs" / "data")
    assert "step 3/3" in done.stderr


@pytest.mark.ray
def test_a_jobs_own_exit_code_and_sentence_come_back(head: Head):
    done = head.run(
        *(
            sys.executable,
            "-m",
            "tokendrop",
            "submit",
            "jobs/tiny.yaml",
            "train.micro_batch=1",
            "scaling.workers=4",
        ),
        *("--address", head.address),
    )

    assert done.returncode == 2, done.stdout + done.stderr
    sentence = done.stdout.splitlines()[-1]
    assert sentence.startswith("tokendrop: scaling: 4 workers want 4 CPUs, this cluster has 3")


@pytest.mark.ray
def test_ctrl_c_stops_the_job_on_the_cluster(head: Head):
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tokendrop", "submit", "jobs/tiny.yaml", "train.length=100000 steps"),
            *("--address", head.address, "--json"),
        ],
        cwd=head.folder,
        env=head.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stderr is not None
        for line in following.stderr:
            if line.startswith("Running entrypoint"):
                break
        following.send_signal(signal.SIGINT)
        out, error = following.communicate(timeout=60)

    assert following.returncode == 130, error
    assert "the cluster was asked to stop the job" in error
    assert json.loads(out)["status"] == "STOPPED"
