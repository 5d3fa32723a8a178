"""Forks of runs whose kept lengths are decided as they go."""

import json
from pathlib import Path

import pytest

from forks import AT, JOB, forked, history, trained, write_data
from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.launch.results import with_absolute_paths
from tokendrop.track.decisions import read_decisions
from tokendrop.track.run_folder import describe_run

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
