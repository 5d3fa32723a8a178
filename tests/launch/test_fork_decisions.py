"""Forks of runs whose kept lengths are decided as they go."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forks import AT, JOB, forked, history, trained, write_data
from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.resume import check_goes_on
from tokendrop.schedule.duration import Duration
from tokendrop.track.decisions import DECISIONS, note_decision, read_decisions
from tokendrop.track.run_folder import describe_run
from tokendrop.train.adaptive import Decision

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ADAPTIVE = {"kind": "adaptive", "start": 4, "increment": 4, "every": "1 steps", "budget": 0.6}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def test_a_fork_has_the_decisions_of_its_parent_until_its_step(tmp_path: Path, data: Path) -> None:
    config = with_absolute_paths(experiment(**JOB, runs_folder=str(tmp_path), drop__schedule=ADAPTIVE))
    parent = tmp_path / "parent"
    parent.mkdir()
    describe_run(parent, config, data)
    trained(parent, config, data)
    same = forked(parent, AT)
    assert history(same) == history(parent)
    assert read_decisions(same) == read_decisions(parent)
    other = forked(parent, AT, "drop.schedule.grow_above=99", "drop.schedule.hold_below=99")
    kept = [[one.kept_length for one in read_decisions(run)["schedule"]] for run in (parent, other)]
    assert kept[0][:AT] == kept[1][:AT]
    assert history(other)[:AT] == history(parent)[:AT]
    with pytest.raises(UserError, match=rf"^drop: what {parent} has decided is none of this job's schedules \("):
        forked(parent, AT, "drop.schedule.increment=2")


def test_a_fork_begins_with_no_kept_length_undecided(tmp_path: Path, data: Path) -> None:
    config = with_absolute_paths(experiment(**JOB, runs_folder=str(tmp_path)))
    parent = tmp_path / "parent"
    parent.mkdir()
    describe_run(parent, config, data)
    trained(parent, config, data)
    with pytest.raises(
        UserError, match=rf"^drop\.schedule\.decided: want the kept lengths that are decided up to step {AT}"
    ):
        forked(parent, AT, f"drop.schedule={json.dumps(ADAPTIVE)}")


def test_a_run_that_begins_anew_decides_anew(tmp_path: Path, data: Path) -> None:
    config = with_absolute_paths(experiment(**JOB, runs_folder=str(tmp_path), drop__schedule=ADAPTIVE))
    describe_run(tmp_path, config, data)
    assert (tmp_path / DECISIONS).is_file()  # from the begin on, for those who watch it
    note_decision(tmp_path, "schedule", Decision(step=1, kept_length=4, gap=0.0))
    describe_run(tmp_path, config, data)
    assert read_decisions(tmp_path) == {}
    describe_run(tmp_path, with_absolute_paths(experiment(**JOB, runs_folder=str(tmp_path))), data)
    assert not (tmp_path / DECISIONS).exists()


def test_a_run_that_decides_goes_on_to_the_same_length_alone(tmp_path: Path, data: Path) -> None:
    config = with_absolute_paths(experiment(**JOB, runs_folder=str(tmp_path), drop__schedule=ADAPTIVE))
    describe_run(tmp_path, config, data)
    trained(tmp_path, config, data)
    check_goes_on(config, tmp_path)
    longer = replace(config, train=replace(config.train, length=Duration.parse("9 steps")))
    with pytest.raises(UserError, match=r"^train\.length: .* decides the kept lengths of 8 steps, this job has 9;"):
        check_goes_on(longer, tmp_path)
