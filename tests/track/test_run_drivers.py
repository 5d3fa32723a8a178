"""Who writes a run in a store: one driver, that begins with what is there, and whom others do not take for a reader."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stored_runs import begun, elsewhere, in_store, save, state, written
from stores import S3, SLOW_DOWN
from tiny import experiment
from tokendrop.atomic import exclusive_lock
from tokendrop.errors import StorageError
from tokendrop.launch.stored import kept_in_store
from tokendrop.track.run_copy import bring
from tokendrop.track.run_folder import begun_run
from tokendrop.track.run_home import RunHome, home_of
from tokendrop.track.run_store import PLACE, runs_place
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, step_name, step_of


@contextmanager
def held_at(s3: S3, method: str, what: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds a request up: the first event says that it has come, the second lets it go."""
    come, go = threading.Event(), threading.Event()

    def trouble(asked: str, path: str) -> None:
        if asked == method and what in path and not come.is_set():
            come.set()
            go.wait(30)

    s3.app.trouble = trouble
    try:
        yield come, go
    finally:
        go.set()
        s3.app.trouble = lambda method, path: None


def test_a_driver_with_an_old_copy_goes_on_from_what_the_store_has(s3, runs, tmp_path, monkeypatch):
    old = begun(runs)
    save(old, 3)
    there = elsewhere(runs, tmp_path / "there", monkeypatch)
    home = home_of(there)
    assert home is not None
    home.take_over()
    for step in (6, 9):
        save(home, step)
    with exclusive_lock(old.folder), kept_in_store(old.folder) as again:
        assert again is not None
        assert state(old.folder) == (9, [3, 6, 9])
        worker = RunHome(old.folder)
        worker.cut(9)
        save(worker, 12)
    assert state(elsewhere(runs, tmp_path / "elsewhere", monkeypatch)) == (12, [3, 6, 9, 12])


def test_nothing_newer_than_where_a_run_goes_on_is_removed_but_what_is_damaged(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    for step in (3, 6):
        save(home, step, keep=2)
    home.take_over()
    home = RunHome(home.folder)
    with pytest.raises(StorageError, match=r"has a checkpoint of step 6, and this driver goes on from 3; want"):
        home.cut(3)
    assert state(elsewhere(runs, tmp_path / "there", monkeypatch)) == (6, [3, 6])
    home.store.put(in_store(home, 6), b"damaged")
    shutil.rmtree(home.folder / CHECKPOINTS / step_name(6))
    with exclusive_lock(home.folder), kept_in_store(home.folder):
        worker = RunHome(home.folder)
        worker.cut(3)
        assert worker.committed_step() == 3
        save(worker, 6, keep=2, content="others")
    assert state(elsewhere(runs, tmp_path / "elsewhere", monkeypatch)) == (6, [3, 6])


def test_who_asks_while_another_copies_gets_all_of_it(s3, runs, tmp_path, monkeypatch):
    save(begun(runs), 3)
    monkeypatch.setenv(PLACE, str(tmp_path / "there"))
    with held_at(s3, "GET", "weights.distcp") as (come, go), ThreadPoolExecutor(2) as threads:
        first = threads.submit(bring, runs, "one")
        assert come.wait(30)
        second = threads.submit(bring, runs, "one")
        assert not threading.Event().wait(0.5)
        assert not second.done()
        go.set()
        assert [state(one.result()) for one in (first, second)] == [(3, [3])] * 2


def test_a_driver_waits_for_who_copies_and_a_reader_for_no_driver(s3, runs, tmp_path, monkeypatch):
    save(begun(runs), 3)
    monkeypatch.setenv(PLACE, str(tmp_path / "there"))

    def driven(folder: Path) -> tuple[int, list[int]]:
        with exclusive_lock(folder, patience_s=0.2), kept_in_store(folder):
            assert bring(runs, "one") == folder  # by a reader, meanwhile
            return state(folder)

    with held_at(s3, "GET", "weights.distcp") as (come, go), ThreadPoolExecutor(2) as threads:
        reader = threads.submit(bring, runs, "one")
        assert come.wait(30)
        driver = threads.submit(driven, runs_place(runs) / "one")
        assert not threading.Event().wait(0.5)
        go.set()
        assert driver.result() == (3, [3])
        assert state(reader.result()) == (3, [3])


def test_a_driver_that_hangs_can_not_change_what_the_next_one_commits(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    save(home, 3)
    late = written(home, 6, "late weights")
    with held_at(s3, "PUT", "weights.distcp") as (come, go), ThreadPoolExecutor(1) as threads:
        hangs = threads.submit(home.put, late / "weights.distcp")
        assert come.wait(30)
        there = elsewhere(runs, tmp_path / "there", monkeypatch)
        RunHome(there).take_over()
        save(RunHome(there), 6)
        go.set()
        hangs.result()  # it was on its way
    assert state(elsewhere(runs, tmp_path / "elsewhere", monkeypatch)) == (6, [3, 6])


def test_a_driver_that_comes_late_writes_and_removes_nothing(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    for step in (3, 6):
        save(home, step, keep=2)
    late = written(home, 9)
    tries = 0

    def trouble(method: str, path: str) -> tuple[str, bytes] | None:
        nonlocal tries
        if method not in ("PUT", "POST") or "weights.distcp" not in path:
            return None
        tries += 1
        if tries == 1:
            RunHome(home.folder).take_over()
        return ("503 Slow Down", SLOW_DOWN)

    s3.app.trouble = trouble
    with pytest.raises(StorageError, match="now trains this run"):
        home.put(late / "weights.distcp")
    s3.app.trouble = lambda method, path: None
    shutil.rmtree(home.folder / CHECKPOINTS / step_name(3))
    before = home.store.files()
    with pytest.raises(StorageError, match="now trains this run"):
        home.remove_old(1)
    assert home.store.files() == before


def test_what_lost_workers_left_of_older_checkpoints_is_removed(s3, runs):
    home = begun(runs)
    save(home, 3)
    for step in (6, 12):
        home.put(written(home, step) / "weights.distcp")
    save(home, 9)
    steps = {step_of(Path(name).parents[1]) for name in home.store.files(CHECKPOINTS)}
    assert steps == {9, 12}  # which may just be written


def test_a_copy_keeps_the_newest_checkpoint_alone(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    for step in (3, 6):
        save(home, step)
        there = elsewhere(runs, tmp_path / "there", monkeypatch)
    assert [path.name for path in committed(there / CHECKPOINTS)] == [step_name(6)]


def test_the_copy_of_a_run_that_the_store_lacks_is_moved_and_told(s3, runs, capfd):
    home = begun(runs)
    save(home, 3)
    home.store.remove("job.yaml")
    assert begun_run(replace(experiment(), runs_folder=runs, run="one")) is None
    assert not home.folder.exists()
    told = capfd.readouterr().err
    moved = Path(told.strip().rpartition(" ")[2])
    assert "one: the store has no such run; the copy that was here is now" in told
    assert state(moved) == (3, [3])
