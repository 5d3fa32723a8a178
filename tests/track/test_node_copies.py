"""Copies of a run in a store on machines of its workers, and what the driver's copy gets of what they wrote."""

from pathlib import Path

import pyarrow as pa
import pytest

from stored_runs import begun, elsewhere, save, state, written
from tiny import experiment
from tokendrop.launch.separate_disks import with_copy
from tokendrop.launch.stored import Stored, kept_in_store
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.journal import LEDGER, LEDGER_SCHEMA, METRICS
from tokendrop.track.parts import span_of, write_part
from tokendrop.track.run_copy import bring_for_workers, catch_up
from tokendrop.track.run_home import RunHome, steps_done
from tokendrop.track.run_store import PLACE, workers_place
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, step_name


def copy_of_workers(home: RunHome, folder: Path) -> RunHome:
    """With the record of the driver's copy, as `Relay` makes it."""
    bring_for_workers(folder, home.address, home.driver)
    (folder / METRICS).write_bytes((home.folder / METRICS).read_bytes())
    return RunHome(folder)


def test_workers_apart_go_on_from_the_newest_checkpoint_and_have_no_record(s3, runs, tmp_path):
    home = begun(runs)
    for step in (3, 6):
        save(home, step)
    copy = copy_of_workers(home, tmp_path / "worker")
    assert state(copy.folder) == (6, [])
    assert (copy.folder / "job.yaml").read_text() == (home.folder / "job.yaml").read_text()
    save(copy, 9)
    again = copy_of_workers(home, tmp_path / "another")
    assert [path.name for path in committed(again.folder / CHECKPOINTS)] == [step_name(9)]


def test_what_workers_left_on_a_machine_never_reaches_the_store(s3, runs, tmp_path):
    home = begun(runs)
    save(home, 3)
    copy = copy_of_workers(home, tmp_path / "worker")
    written(copy, 6)  # and they died before it counted
    (copy.folder / "trace").mkdir()
    (copy.folder / "trace" / "rank0.json").write_text("{}")
    row = {"step": [5, 6], "rank": [0, 0], "world_size": [1, 1], "sample_ids": [[5], [6]]}
    others = copy_of_workers(home, tmp_path / "another")
    write_part(others.folder / LEDGER, pa.table(row, schema=LEDGER_SCHEMA), start=4, end=6, rank=0)
    others.put_record(6)
    save(others, 9)
    again = copy_of_workers(home, tmp_path / "worker")
    again.know_small_files()
    again.cut(9)
    save(again, 12)
    parts = {name for name in s3.files(home.store.opened[1]) if name.startswith((LEDGER, "trace"))}
    spans = sorted(span for name in parts if (span := span_of(Path(name))))
    assert spans == [(0, 3), (4, 6), (6, 9), (9, 12)]
    assert len(parts) == len(spans)


def test_workers_that_share_the_disk_again_go_on_from_what_those_apart_have_committed(s3, runs, tmp_path):
    home = begun(runs)
    copy = copy_of_workers(home, tmp_path / "worker")
    for step in (3, 6):
        save(copy, step)
    stored = Stored(address=home.address, driver=home.driver)
    spec = WorkerSpec(config=experiment(), run=home.folder, data=tmp_path, stored=stored)
    with with_copy(spec) as (here, again):
        assert here == spec
        assert again is not None
        assert state(home.folder) == (6, [3, 6])
        again.cut(6)
    assert steps_done(home.folder) == 6


def test_a_checkpoint_of_which_a_machine_has_a_part_is_made_whole(s3, runs, tmp_path):
    home = begun(runs)
    save(home, 3)
    copy = copy_of_workers(home, tmp_path / "worker")
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


def test_what_the_driver_has_written_since_stays(s3, runs, tmp_path):
    home = begun(runs)
    (home.folder / "decisions.json").write_text("made since")
    with (home.folder / METRICS).open("a") as live:
        live.write("a line of the driver\n")
    record = (home.folder / METRICS).read_bytes()
    home.store.put("decisions.json", b"older")
    asked: list[str] = []
    s3.app.trouble = lambda method, path: asked.append(path)
    catch_up(home)
    assert len(asked) == 1, "nothing is committed yet"
    s3.app.trouble = lambda method, path: None
    copy = copy_of_workers(home, tmp_path / "worker")
    (copy.folder / "trace.json").write_text("{}")
    save(copy, 3)
    home.store.put("decisions.json", b"older")
    (home.folder / METRICS).write_bytes(record)
    catch_up(home)
    assert state(home.folder) == (3, [3])
    assert (home.folder / "trace.json").exists()
    assert (home.folder / "decisions.json").read_text() == "made since"
    assert (home.folder / METRICS).read_bytes() == record


def test_nothing_is_committed_that_the_driver_has_not_heard_of(s3, runs, tmp_path):
    home = begun(runs)
    copy = copy_of_workers(home, tmp_path / "worker")
    before = s3.files(home.store.opened[1])

    def fail() -> int:
        raise RuntimeError("no answer")

    copy.before_commit = fail
    checkpoint = written(copy, 3)
    copy.put(checkpoint / "weights.distcp")
    with pytest.raises(RuntimeError, match="no answer"):
        copy.commit(checkpoint)
    added = s3.files(home.store.opened[1]) - before
    assert {name.rpartition("/")[2] for name in added} == {"weights.distcp"}
    assert steps_done(home.folder) == 0


def test_no_line_is_written_that_the_driver_has_not_heard_of(s3, runs, tmp_path):
    home = begun(runs)
    copy = copy_of_workers(home, tmp_path / "worker")
    heard = (copy.folder / METRICS).stat().st_size

    def grow() -> int:
        with (copy.folder / METRICS).open("ab") as live:
            live.write(b"a line that comes later\n")
        return heard

    copy.before_commit = grow
    checkpoint = written(copy, 3)
    copy.commit(checkpoint)
    assert sum(size for size, _ in home.store.files(METRICS).values()) == heard
    copy.before_commit = lambda: None
    copy.put_record(3)
    assert sum(size for size, _ in home.store.files(METRICS).values()) > heard


def test_workers_of_other_nodes_have_other_folders_and_none_is_that_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.setenv(PLACE, str(tmp_path))
    places = {workers_place("s3://bucket/runs/one?scheme=http", f"{node}" * 56) for node in "ab"}
    assert len(places) == 2
    assert {place.parent.parent.parent for place in places} == {tmp_path / ".nodes"}
    assert {place.name for place in places} == {"one"}
