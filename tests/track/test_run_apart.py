"""Copies of a run in a store on machines of its workers, and what the driver's copy gets of what they wrote."""

from pathlib import Path

import pytest

from stored_runs import begun, elsewhere, save, state, written
from tokendrop.launch.stored import kept_in_store
from tokendrop.track.journal import LEDGER, METRICS
from tokendrop.track.run_copy import bring_for_workers, catch_up
from tokendrop.track.run_home import RunHome, steps_done
from tokendrop.track.run_store import PLACE, workers_place
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, step_name


def copy_of_workers(home: RunHome, folder: Path) -> RunHome:
    """With the record of the driver's copy, as `Relay` makes it."""
    copy = bring_for_workers(folder, home.address, home.driver)
    (folder / METRICS).write_bytes((home.folder / METRICS).read_bytes())
    return copy


def test_workers_apart_go_on_from_the_newest_checkpoint_and_have_no_record(s3, runs, tmp_path):
    home = begun(runs)
    for step in (3, 6):
        save(home, step)
    copy = bring_for_workers(tmp_path / "worker", home.address, home.driver)
    assert state(copy.folder) == (6, [])
    assert (copy.folder / "job.yaml").read_text() == (home.folder / "job.yaml").read_text()
    save(copy, 9)
    again = bring_for_workers(tmp_path / "another", home.address, home.driver)
    assert [path.name for path in committed(again.folder / CHECKPOINTS)] == [step_name(9)]


def test_a_checkpoint_of_which_a_machine_has_a_part_is_made_whole(s3, runs, tmp_path):
    home = begun(runs)
    save(home, 3)
    copy = bring_for_workers(tmp_path / "worker", home.address, home.driver)
    weights = copy.folder / CHECKPOINTS / step_name(3) / "weights.distcp"
    weights.unlink()  # which another machine wrote
    bring_for_workers(copy.folder, home.address, home.driver)
    assert weights.read_text() == "weights of 3"


def test_the_copy_of_the_driver_has_at_the_end_what_its_workers_wrote_elsewhere(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    with kept_in_store(home.folder) as driver:
        assert driver is not None
        copy = copy_of_workers(driver, tmp_path / "worker")
        for step in (3, 6):
            save(copy, step)
        assert steps_done(home.folder) == 6
        assert state(home.folder) == (0, [])
        (home.folder / METRICS).write_bytes((copy.folder / METRICS).read_bytes())
    assert state(home.folder) == (6, [3, 6])
    there = elsewhere(runs, tmp_path / "there", monkeypatch)
    assert state(there) == (6, [3, 6])
    assert (there / METRICS).read_bytes() == (home.folder / METRICS).read_bytes().rpartition(b"\n")[0] + b"\n"


def test_a_copy_that_has_it_all_is_left_as_it_is(s3, runs, tmp_path):
    home = begun(runs)
    save(home, 3)
    asked: list[str] = []
    s3.app.trouble = lambda method, path: asked.append(path)
    catch_up(home)
    assert len(asked) == 1, "one list of all files"
    (home.folder / LEDGER / next((home.folder / LEDGER).iterdir()).name).unlink()
    catch_up(home)
    assert state(home.folder) == (3, [3])


def test_nothing_is_committed_that_the_driver_has_not_heard_of(s3, runs, tmp_path):
    home = begun(runs)
    copy = copy_of_workers(home, tmp_path / "worker")
    before = s3.files(home.store.opened[1])

    def fail() -> None:
        raise RuntimeError("no answer")

    copy.before_commit = fail
    checkpoint = written(copy, 3)
    copy.put(checkpoint / "weights.distcp")
    with pytest.raises(RuntimeError, match="no answer"):
        copy.commit(checkpoint)
    added = s3.files(home.store.opened[1]) - before
    assert {name.rpartition("/")[2] for name in added} == {"weights.distcp"}
    assert steps_done(home.folder) == 0


def test_workers_of_other_nodes_have_other_folders_and_none_is_that_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.setenv(PLACE, str(tmp_path))
    places = {workers_place("s3://bucket/runs/one?scheme=http", f"{node}" * 56) for node in "ab"}
    assert len(places) == 2
    assert {place.parent.parent.parent for place in places} == {tmp_path / ".nodes"}
    assert {place.name for place in places} == {"one"}
