"""A run starts by processes one after another; each imports what it needs, for imports are most of a start."""

import os
import subprocess
import sys
from pathlib import Path

from ray import cloudpickle

from tiny import experiment
from tokendrop.launch.trainer import _settings
from tokendrop.launch.worker_spec import WorkerSpec

ROOT = Path(__file__).parents[2]
_WHAT_TRAINS = {"torch._dynamo", "torch.distributed.checkpoint", "tokendrop.launch.worker"}


def loaded_by(code: str) -> set[str]:
    """The modules of a new process after the code."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_driver_imports_nothing_of_what_trains_and_not_mlflow() -> None:
    code = "import tokendrop.launch.trainer\nfrom tokendrop.config.load import load_job\n"
    job = ROOT / "jobs" / "pretrain" / "quickstart.yaml"
    loaded = loaded_by(f"{code}config = load_job({str(job)!r})\nconfig.task.build(config)")
    assert "ray.train.torch" in loaded
    assert not loaded & {*_WHAT_TRAINS, "mlflow"}


def test_ray_trains_controller_imports_no_part_of_the_driver(tmp_path: Path) -> None:
    """It unpickles what a trainer is made with, all but the function that workers run."""
    settings = _settings(WorkerSpec(config=experiment(), run=tmp_path, data=tmp_path), 2, 0)
    pickled = tmp_path / "settings"
    given = {key: value for key, value in settings.items() if key != "train_loop_per_worker"}
    pickled.write_bytes(cloudpickle.dumps(given))
    code = "import pathlib, pickle, tokendrop.elastic.policy\n"
    loaded = loaded_by(f"{code}pickle.loads(pathlib.Path({str(pickled)!r}).read_bytes())")
    assert "tokendrop.launch.failures" in loaded
    assert not loaded & {*_WHAT_TRAINS, "tokendrop.launch.trainer", "tokendrop.launch.train_loop"}


def test_a_process_that_stands_by_has_imported_what_trains() -> None:
    code = "from tokendrop.elastic import standby\nstandby.import_all(standby._IMPORTS)"
    assert loaded_by(code) >= {*_WHAT_TRAINS, "tokendrop.launch.train_loop", "torch.distributed.fsdp"}
