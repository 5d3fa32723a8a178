"""Workers find what those before them have compiled, on another machine too; a driver that comes later forgets it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from attempts import lone_worker
from corpora import tiny_job
from forks import JOB, trained, write_data
from groups import together
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.elastic.control import RunControl
from tokendrop.launch.compiled import leave_compiled, take_compiled
from tokendrop.launch.train_loop import fit_in_this_process
from tokendrop.launch.trainer import run_training
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.run_files import small_files
from tokendrop.track.run_folder import describe_run
from tokendrop.train.warm_up import warm_up

COMPILER = "g++"


def job() -> ExperimentConfig:
    return experiment(**JOB, train__compile=True, train__precision="fp32")


def training(run: Path, machine: Path) -> None:
    """What a worker does on a machine, a folder, that has compiled nothing yet."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(machine)
    data = write_data(run / "data")
    describe_run(run, job(), data)
    trained(run, job(), data)
    tell(machine)


def compiling(run: Path, machine: Path, takes: bool) -> None:
    """What a worker does before its first step on a machine that has compiled nothing yet."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(machine)
    if takes:
        take_compiled(run)
    warm_up(job(), lone_worker(job()), start=0)
    leave_compiled(run)
    tell(machine)


def tell(machine: Path) -> None:
    (machine / "graphs.json").write_text(json.dumps(torch._dynamo.utils.counters["inductor"]))


def graphs_of(machine: Path) -> tuple[int, int]:
    """Graphs that the worker on a machine has compiled, and those that it has found compiled."""
    told = json.loads((machine / "graphs.json").read_text())
    return told.get("fxgraph_cache_miss", 0), told.get("fxgraph_cache_hit", 0)


@pytest.mark.long
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"inductor needs {COMPILER}, which is not here")
@pytest.mark.timeout(900)
def test_machines_that_come_find_what_the_run_has_compiled_until_another_driver_trains_it(tmp_path: Path) -> None:
    run, first, following, alone = (tmp_path / name for name in ("run", "first", "following", "alone"))
    for folder in (run, first, following, alone):
        folder.mkdir()
    together(1, training, run, first)
    compiled = graphs_of(first)[0]
    assert compiled > 0
    together(1, compiling, run, following, True)
    assert graphs_of(following) == (0, compiled)
    together(1, compiling, run, alone, False)
    assert graphs_of(alone) == (compiled, 0)

    kept = RunControl(run).compiled
    assert kept.stat().st_size > 0
    assert not any(kept.name in name for name in small_files(run)), "it goes into no store"
    RunControl(run).reset()
    assert not kept.exists()
    take_compiled(run)  # nothing, which is no error


def test_what_can_not_be_read_is_said_and_compiled_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    RunControl(tmp_path).reset()
    RunControl(tmp_path).compiled.mkdir()
    take_compiled(tmp_path)
    assert "note     compiled code could not be taken: " in capfd.readouterr().err


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_nothing_of_it_stays_when_a_run_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_job(tiny_job(tmp_path, ["python"]))

    def fit(spec: WorkerSpec, control: RunControl) -> None:
        fit_in_this_process(spec, control)
        control.compiled.write_bytes(b"code")

    run = Path(run_training(config, fit=fit)["run"])
    assert not RunControl(run).compiled.exists()
