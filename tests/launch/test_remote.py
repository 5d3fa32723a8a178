"""A driver here, on a cluster of machines that do not have its code."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from checkouts import ROOT, dependencies_alone
from heads import ray_head, short_folder
from tokendrop.launch.cluster import _source_for

WHERE = """
import json, ray
from ray.util.state import list_jobs
from tokendrop.launch.cluster import connect
connect(name="mine")

@ray.remote
def imported():
    import tokendrop.config.load as ours
    profile = ours.load_job("JOB", ["scaling.mode=schedule", "scaling.profile=a100-40g-8"]).scaling.profile
    return ours.__file__, profile.name

print(json.dumps([*ray.get(imported.remote()), [job.metadata for job in list_jobs(detail=True)]]))
"""


def own_address() -> str:
    """An address of this machine that others could reach, as that of a cluster elsewhere is one."""
    found = [one.address for device in psutil.net_if_addrs().values() for one in device if one.family == 2]
    others = [address for address in found if not address.startswith("127.")]
    if not others:
        pytest.skip("this machine has no address but those of its loopback device")
    return others[0]


@pytest.fixture
def elsewhere() -> Iterator[dict[str, str]]:
    """The environment to reach a Ray whose Python can't import tokendrop."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    options = {"num-cpus": 1, "node-ip-address": (host := own_address())}
    with short_folder() as folder:
        python = dependencies_alone(folder / "venv")
        with ray_head(python, folder / "ray", kept | access, options) as head:
            yield kept | access | {"RAY_ADDRESS": f"{host}:{head.gcs}"}


@pytest.mark.ray
def test_workers_elsewhere_get_the_source_of_the_driver(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    script = WHERE.replace("JOB", str(ROOT / "jobs" / "pretrain" / "elastic.yaml"))
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=elsewhere | {"PYTHONPATH": str(ROOT / "platform")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if "no Ray cluster lets this process in" not in done.stderr or time.monotonic() > deadline:
            break  # else the head does not answer yet
    assert done.returncode == 0, done.stderr
    file, profile, jobs = json.loads(done.stdout.splitlines()[-1])
    assert "py_modules_files" in file
    assert not Path(file).is_relative_to(ROOT)
    assert profile == "a100-40g-8"
    assert jobs == [{"job_name": "mine"}]


def test_clusters_of_this_machine_and_submitted_jobs_take_no_upload(tmp_path: Path, monkeypatch) -> None:
    for address in ("127.0.0.2:6379", "localhost:6379", "ray://127.0.0.1:10001"):
        assert set(_source_for(address)) == {"env_vars"}
    assert _source_for("10.0.0.1:6379")["py_modules"] == [str(ROOT / "platform" / "tokendrop")]
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/platform:/opt/mine")
    assert _source_for("auto")["env_vars"] == {"PYTHONPATH": "/opt/mine"}
    copy = tmp_path / "working_dir_files" / "_ray_pkg_0"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    assert set(_source_for("10.0.0.1:6379")) == {"env_vars"}
