"""Losses of whole runs, step by step, as they were recorded: what is trained must not change unless it is meant to.

`TOKENDROP_RECORD=1 make goldens` records them anew.
"""

import json
import os
import platform
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from runs import config_of, kill_at, losses, write_job
from tokendrop.launch.trainer import run_training

FOLDER = Path(__file__).parents[1] / "goldens"
RECORDED = FOLDER / "losses.json"
RECORDS = os.environ.get("TOKENDROP_RECORD") == "1"
ON_OTHER_CPUS = 1e-9  # relative: matrix products of other CPUs, or of another torch, add up in another order

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def versions() -> dict[str, str]:
    """What the bits of a loss depend on, beside the code."""
    return {
        "python": platform.python_version(),  # of which the quickstart's corpus is a part
        "torch": torch.__version__.partition("+")[0],
        "numpy": np.__version__,
        "ray": ray.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def check(name: str, run: Path) -> None:
    """Compare a run's losses with the record, or record them."""
    found = [loss.hex() for loss in losses(run)]
    record: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if RECORDS:
        record[name] = {"versions": versions(), "losses": found}
        RECORDED.write_text(json.dumps(record, indent=1) + "\n")
        return
    made_with = record[name]["versions"]
    same = [key for key, value in versions().items() if made_with[key] == value]
    if {"torch", "numpy", "cpu"} <= {*same}:
        assert found == record[name]["losses"]
    else:
        expected = [float.fromhex(loss) for loss in record[name]["losses"]]
        np.testing.assert_allclose([float.fromhex(loss) for loss in found], expected, rtol=ON_OTHER_CPUS)


def test_a_small_run_trains_as_recorded(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    check("small", Path(run_training(config_of(job, "train.length=40 steps", "train.final_lr=1.0e-5"))["run"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these runs share the token shards of Python's own text."""
    made_with = {} if RECORDS else json.loads(RECORDED.read_text())["quickstart"]["versions"]
    if not RECORDS and made_with["python"] != platform.python_version():
        pytest.skip(f"recorded on the text of Python {made_with['python']}, this is {platform.python_version()}")
    return tmp_path_factory.mktemp("goldens")


SMALL_BATCH = ("train.global_batch=2", "train.micro_batch=1")  # of the jobs' 8, to take a minute each


def run_golden(name: str, folder: Path, *overrides: str) -> Path:
    job = folder / f"{name}.yaml"
    for file in FOLDER.glob("*.yaml"):
        (folder / file.name).write_bytes(file.read_bytes())
    fp64 = ("train.precision=fp64", "train.length=40 steps", "track.uri=null")
    config = config_of(job, *fp64, *SMALL_BATCH, *overrides)
    return Path(run_training(config)["run"])


@pytest.mark.golden
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["quickstart_baseline", "quickstart", "elastic"])
def test_a_run_trains_as_recorded(folder: Path, name: str) -> None:
    check(name, run_golden(name, folder))


@pytest.mark.golden
@pytest.mark.timeout(1800)
def test_a_run_killed_and_resumed_trains_as_recorded(folder: Path) -> None:
    killer = threading.Thread(target=kill_at, args=(folder / "killed", 15), daemon=True)
    killer.start()
    run = run_golden("quickstart", folder, f"runs_folder={folder}/killed", "checkpoint.every=10 steps")
    killer.join(timeout=10)
    check("quickstart killed and resumed", run)
