"""A run's place in a store, by S3's protocol: whatever becomes of its writer, what is committed there is whole."""

import json
import shutil
from contextlib import suppress

import pytest

from stored_runs import EVERY, begun, elsewhere, in_store, save, state, written
from stores import INTERNAL, SLOW_DOWN
from tokendrop.errors import DamagedDataError, StorageError, UserError
from tokendrop.track import run_home
from tokendrop.track.journal import LEDGER, METRICS
from tokendrop.track.run_copy import bring, copied_run
from tokendrop.track.run_files import DRIVER, JOB, committed_in
from tokendrop.track.run_home import RunHome, write_home
from tokendrop.track.run_store import PLACE, RunStore, check_writable, runs_place, split_address
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, step_name

DENIED = "403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Death:
    """Of the writer at one of its requests, counted from 1: none of them is answered from there on."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def __call__(self, method: str, path: str) -> tuple[str, bytes] | None:
        self.asked += method in ("PUT", "POST", "DELETE")
        return DENIED if self.asked >= self.at else None


def test_wherever_a_writer_dies_the_store_has_one_checkpoint_or_the_other(s3, runs, tmp_path, monkeypatch):
    folder = begun(runs).folder
    save(RunHome(folder), EVERY)
    found: list[int] = []
    for number in range(1, 100):
        s3.app.trouble = death = Death(at=number)
        with suppress(StorageError):
            save(RunHome(folder), 2 * EVERY)
        s3.app.trouble = lambda method, path: None
        if death.asked < number:  # it came to its end
            break
        step, parts = state(elsewhere(runs, tmp_path / f"there-{number}", monkeypatch))
        assert parts == list(range(EVERY, step + 1, EVERY))
        found.append(step)
        shutil.rmtree(folder / CHECKPOINTS / step_name(2 * EVERY), ignore_errors=True)
    assert found == sorted(found)
    assert {*found} == {EVERY, 2 * EVERY}  # it died before and after the new one counted
    assert list(committed_in(RunHome(folder).store.files(CHECKPOINTS))) == [2 * EVERY]


def test_what_is_behind_the_step_that_a_run_goes_on_from_is_written_anew(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    for step in (3, 6):
        save(home, step, keep=2)
    home.store.put(f"{LEDGER}/000000006-000000009-rank0.parquet", b"of a writer that died")
    assert state(elsewhere(runs, tmp_path / "there", monkeypatch)) == (6, [3, 6])
    home = RunHome(home.folder)
    home.cut(3)
    assert home.committed_step() == 3
    assert state(elsewhere(runs, tmp_path / "there", monkeypatch)) == (3, [3])
    save(home, 6, keep=2, content="others")
    assert state(run := elsewhere(runs, tmp_path / "there", monkeypatch)) == (6, [3, 6])
    assert (run / CHECKPOINTS / step_name(6) / "weights.distcp").read_text() == "others of 6"


def test_a_damaged_checkpoint_is_passed_over_and_told(s3, runs, tmp_path, monkeypatch, capfd):
    home = begun(runs)
    for step in (3, 6):
        save(home, step, keep=2)
    home.store.put(in_store(home, 6), b"others")
    assert state(elsewhere(runs, tmp_path / "there", monkeypatch)) == (3, [3])
    assert f"{step_name(6)}/{home.driver}/weights.distcp: damaged" in capfd.readouterr().err


def test_a_committed_checkpoint_that_lacks_a_file_is_passed_over_and_told(s3, runs, tmp_path, monkeypatch, capfd):
    home = begun(runs)
    for step in (3, 6):
        save(home, step, keep=2)
    home.store.remove(in_store(home, 6))
    assert state(elsewhere(runs, tmp_path / "there", monkeypatch)) == (3, [3])
    assert "weights.distcp: there is no such file" in capfd.readouterr().err
    home.store.remove(in_store(home, 3))
    with pytest.raises(DamagedDataError, match=r"no other checkpoint that is whole$"):
        elsewhere(runs, tmp_path / "elsewhere", monkeypatch)


def test_the_live_record_goes_in_whole_lines_and_comes_back_as_it_was(s3, runs, tmp_path, monkeypatch):
    home = begun(runs)
    for step in (3, 6):
        save(home, step)
    there = elsewhere(runs, tmp_path / "there", monkeypatch)
    lines = (there / METRICS).read_bytes()
    assert lines.endswith(b"\n")
    assert (home.folder / METRICS).read_bytes().startswith(lines)
    assert b'"paused_at": 6' in lines
    parts = s3.files(f"bucket/{tmp_path.name}/one/{METRICS}")
    assert len(parts) == 3
    monkeypatch.setenv(PLACE, str(tmp_path / "here"))
    assert bring(runs, "one") == home.folder
    assert (home.folder / METRICS).read_bytes().endswith(b"half a li")  # what the store lacks stays


def test_a_driver_that_began_later_ends_the_one_before(s3, runs):
    home = begun(runs)
    save(home, 3)
    RunHome(home.folder).take_over()
    with pytest.raises(StorageError, match=r"a driver on \S+ now trains this run, since"):
        save(home, 6)
    assert home.committed_step() == 3


def test_a_run_that_begins_with_a_checkpoint_brings_it_along(s3, runs, tmp_path, monkeypatch):
    folder = runs_place(runs) / "one"
    write_home(folder, runs.replace("?", "/one?"))
    checkpoint = written(home := RunHome(folder), 3)
    checkpoint.rename(checkpoint.with_suffix(""))
    home.take_over()
    home.begin()
    assert state(elsewhere(runs, tmp_path / "there", monkeypatch)) == (3, [3])


def test_wherever_a_fork_dies_that_begins_the_store_has_its_checkpoint_or_no_run(s3, runs):
    for number in range(1, 100):
        name = f"fork-{number}"
        folder = runs_place(runs) / name
        write_home(folder, runs.replace("?", f"/{name}?"))
        (folder / JOB).write_text("name: fork\n")
        checkpoint = written(home := RunHome(folder), 3)
        checkpoint.rename(checkpoint.with_suffix(""))
        home.take_over()
        s3.app.trouble = death = Death(at=number)
        with suppress(StorageError, UserError):
            home.begin()
        s3.app.trouble = lambda method, path: None
        assert not home.store.has(JOB) or home.committed_step() == 3
        if death.asked < number:  # it came to its end
            break
        RunHome(folder).begin()
        assert home.store.has(JOB)
    assert 3 < number < 99


def test_requests_that_are_throttled_or_fail_are_made_again(s3, runs, tmp_path, monkeypatch):
    answers, asked = [("503 Slow Down", SLOW_DOWN), ("500 Internal Server Error", INTERNAL), None, None, None], 0

    def trouble(method: str, path: str) -> tuple[str, bytes] | None:
        nonlocal asked
        asked += 1
        return answers[asked % len(answers)]

    home = begun(runs)
    s3.app.trouble = trouble
    for step in (3, 6, 9):
        save(home, step)
    assert state(elsewhere(runs, tmp_path / "there", monkeypatch)) == (9, [3, 6, 9])
    assert asked > 100


def test_a_store_that_fails_for_long_is_told_in_one_sentence(s3, runs, monkeypatch):
    monkeypatch.setattr(run_home, "_PATIENCE_S", 0.2)
    home = begun(runs)
    save(home, 3)
    s3.app.trouble = lambda method, path: None if method in ("GET", "HEAD") else ("503 Slow Down", SLOW_DOWN)
    with pytest.raises(StorageError) as told:
        save(home, 6)
    said = str(told.value)
    assert said.startswith("runs_folder: can't write s3://bucket/")
    assert "tried for 0.2 s" in said
    assert said.endswith(
        f"what is committed there stays, and 'tokendrop train --resume {home.address}' goes on from there"
    )
    assert "\n" not in said
    s3.app.trouble = lambda method, path: None
    assert home.committed_step() == 3


@pytest.mark.parametrize(
    ("folder", "what"),
    [
        ("no-such-bucket/runs", "NO_SUCH_BUCKET"),
        ("bucket/denied", "ACCESS_DENIED"),
    ],
)
def test_a_store_that_takes_no_files_is_told_before_anything_begins(s3, runs, folder, what):
    s3.app.trouble = lambda method, path: DENIED if "denied" in path else None
    with pytest.raises(UserError, match=rf"^runs_folder: can't write s3://{folder}/\.tried-\w+ \(.*{what}"):
        check_writable(s3.uri(folder))


def test_what_is_no_run_of_a_store_is_told(s3, runs):
    with pytest.raises(UserError, match=r"^s3://bucket/nothing: no run there \(no job\.yaml\)"):
        copied_run(s3.uri("bucket/nothing"))
    for address, want in {
        "s3://bucket": "the address of a run",
        "s3://": "s3://BUCKET/PREFIX",
        "http://host/run": "s3://BUCKET/PREFIX",
        "s3://key:secret@bucket/run": "credentials in the environment",
    }.items():
        with pytest.raises(UserError, match=want):
            split_address(address)


def test_a_name_that_leads_out_of_the_copy_is_not_followed(s3, runs, tmp_path, monkeypatch):
    begun(runs)
    RunStore(runs).put("one/evaluations/fine", b"fine")
    s3.write(f"bucket/{tmp_path.name}/one/evaluations/../../../out", b"out")
    run = elsewhere(runs, tmp_path / "there", monkeypatch)
    assert (run / "evaluations" / "fine").read_bytes() == b"fine"
    assert not list(tmp_path.rglob("out"))


def test_the_driver_s_own_file_and_locks_stay_where_they_belong(s3, runs, tmp_path):
    home = begun(runs)
    save(home, 3)
    files = s3.files(f"bucket/{tmp_path.name}/one")
    assert not [file for file in files if file.rpartition("/")[2].startswith(".")]
    assert json.loads(s3.content(f"bucket/{tmp_path.name}/one/{DRIVER}"))["id"] == home.driver
    assert f"{CHECKPOINTS}/{step_name(3)}/{home.driver}/{META}" in files
