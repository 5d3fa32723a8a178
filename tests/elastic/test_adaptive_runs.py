"""Workers that follow kept lengths which are decided while they train."""

import threading
from pathlib import Path

import numpy as np
import pytest

from runs import FLOAT64, config_of, kill_at, losses, write_job
from tokendrop.launch.trainer import run_training
from tokendrop.track.audit import audit
from tokendrop.track.decisions import read_decisions
from tokendrop.track.run_folder import open_run_folder

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

PROFILE = """
name: made-up
kind: derived
source: made up, so that two workers are worth it from a kept length of 16 on
speeds:
  - model: tiny
    shape: {layers: 4, width: 32, sequence_length: 32, vocab_size: 512, mlp_width: 128, causal: true}
    dropped_layers: 2
    points: [{kept_length: 8, micro_batch: 2, seconds: 0.05}, {kept_length: 32, micro_batch: 2, seconds: 1.0}]
devices_per_node: 4
within_node: {bytes_per_s: 1.0e+6, latency_s: 1.0e-4}
between_nodes: {bytes_per_s: 1.0e+6, latency_s: 1.0e-4}
checkpoint_bytes_per_s: 1.0e+9
resize_s: 0.01
"""
# a gap of any size is a reason to grow here, so it grows as early as the budget allows, and not evenly, as expected
SCHEDULE = "{kind: adaptive, start: 8, increment: 8, every: 4 steps, budget: 0.6, grow_above: 0, hold_below: 0}"
JOB = ("train.length=24 steps", "checkpoint.every=6 steps", "evaluate.every=12 steps", f"drop.schedule={SCHEDULE}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = write_job(tmp_path_factory.mktemp("adaptive"))
    (job.parent / "profile.yaml").write_text(PROFILE)
    return job


@pytest.fixture(scope="module")
def fixed(job: Path, ray_cluster: None) -> Path:
    """The run of one worker."""
    return Path(run_training(config_of(job, *JOB))["run"])


@pytest.mark.parametrize("mode", ["schedule", "fit_per_segment"])
def test_workers_change_where_a_decision_wants_them_to(
    job: Path, fixed: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    by_plan = f"scaling={{mode: {mode}, profile: {job.parent}/profile.yaml, max_workers: 2, minimise: time}}"
    config = config_of(job, *JOB, by_plan)
    assert config.plan.resizes == ((8, 1, 2),)  # as is expected before anything is decided
    result = run_training(config)
    run = Path(result["run"])
    found = audit(run)
    assert found.is_clean
    assert [(one.from_step, one.to_step, one.world_size) for one in found.world_sizes] == [(1, 4, 1), (5, 24, 2)]
    assert open_run_folder(run)[0].plan.resizes == ((4, 1, 2),)
    assert (result["resizes"], result["restarts"]) == (1, 0)
    assert "resize   1 -> 2 workers at step 4: " in capsys.readouterr().err
    np.testing.assert_allclose(losses(run), losses(fixed), rtol=FLOAT64)
    one, two = (read_decisions(folder)["schedule"] for folder in (fixed, run))
    assert [(a.step, a.kept_length) for a in one] == [(b.step, b.kept_length) for b in two]


def test_a_worker_that_is_killed_changes_no_decision(job: Path, fixed: Path) -> None:
    runs = job.parent / "killed"
    killer = threading.Thread(target=kill_at, args=(runs, 10))
    killer.start()
    result = run_training(config_of(job, *JOB, f"runs_folder={runs}"))
    killer.join()
    assert result["restarts"] == 1
    assert losses(Path(result["run"])) == losses(fixed)
    assert read_decisions(Path(result["run"])) == read_decisions(fixed)
