"""Run folders that a job names, and what a run came to."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import dump_job
from tokendrop.errors import UserError
from tokendrop.track.decisions import DECISIONS
from tokendrop.track.run_folder import DATA, JOB, begun_run, create_run_folder, loss_slope
from tokendrop.train.sealed import seal_text


def named(tmp_path: Path, **changes: object) -> ExperimentConfig:
    return experiment(runs_folder=str(tmp_path), run="mine", **changes)


def begin(config: ExperimentConfig) -> Path:
    """As far as a driver has come when its run counts as begun."""
    folder = create_run_folder(config)
    (folder / JOB).write_text(seal_text(dump_job(config)))
    (folder / DATA).write_text(seal_text("/shards\n"))
    return folder


def test_a_run_is_begun_once(tmp_path: Path) -> None:
    config = named(tmp_path)
    assert begun_run(config) is None
    folder = begin(config)
    assert begun_run(config) == folder == tmp_path / "mine"


def test_a_driver_that_dies_before_it_has_begun_its_run_leaves_it_to_be_begun(tmp_path: Path) -> None:
    config = named(tmp_path)
    for name in (JOB, DECISIONS):
        (create_run_folder(config) / name).write_text("")
    assert begun_run(config) is None
    assert create_run_folder(config) == tmp_path / "mine"


def test_a_folder_of_another_job_or_of_something_else_is_refused(tmp_path: Path) -> None:
    begin(named(tmp_path))
    with pytest.raises(UserError, match=r"^run: .*/mine is one of the job 'tiny', this is 'other'; want "):
        begun_run(named(tmp_path, name="other"))
    (tmp_path / "data" / "shards").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^run: .*/data is no run folder, and not empty; want another name$"):
        begun_run(experiment(runs_folder=str(tmp_path), run="data"))


def test_without_a_name_each_start_is_a_run_of_its_own(tmp_path: Path) -> None:
    config = experiment(runs_folder=str(tmp_path))
    assert begun_run(config) is None
    assert create_run_folder(config) != create_run_folder(config)


@given(
    noise=st.lists(st.floats(-1, 1), min_size=8, max_size=60),
    slope=st.floats(-0.1, 0.1),
    lost=st.sets(st.integers(0, 59), max_size=3),
)
def test_the_slope_of_the_loss_is_that_of_numpys_fit_to_the_last_quarter(noise, slope, lost):
    losses = [math.nan if n in lost else 3 + slope * n + one for n, one in enumerate(noise)]
    steps = [{"step": n + 1, "loss": loss} for n, loss in enumerate(losses)]
    last = [(n, loss) for n, loss in [*enumerate(losses)][-(len(losses) // 4) :] if not math.isnan(loss)]
    found = loss_slope(steps)
    if len(last) < 2:
        assert found is None
    else:
        assert found == pytest.approx(np.polyfit(*zip(*last, strict=True), 1)[0], abs=1e-9)
