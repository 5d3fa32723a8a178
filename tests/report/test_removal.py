"""`tokendrop runs clean`: what is old goes, by a rule that is plain, and nothing that is in use or no run."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded import record
from tokendrop.atomic import exclusive_lock
from tokendrop.cli.main import main
from tokendrop.data.shards.format import MANIFEST
from tokendrop.report.listing import find_runs
from tokendrop.report.removal import StoredRun, outdated, remove, stored_runs
from tokendrop.track.journal import STEPS
from tokendrop.track.run_folder import DATA, JOB, open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, kept, step_name, write_meta
from tokendrop.train.sealed import read_sealed_text

DAY_S = 24 * 3600
NOW = 1e9


@st.composite
def stored(draw: st.DrawFn) -> list[StoredRun]:
    """Runs of three names; no two of a name changed on the same day."""
    ages = draw(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 90)), max_size=12, unique=True))
    return [
        StoredRun(run=Path(f"run-{number}"), name=name, changed=NOW - days * DAY_S, size_bytes=1)
        for number, (name, days) in enumerate(ages)
    ]


@given(stored(), st.integers(0, 4), st.integers(0, 90))
def test_what_goes_is_neither_young_nor_among_the_last_of_its_name(
    runs: list[StoredRun], keep_last: int, days: int
) -> None:
    gone = outdated(runs, keep_last=keep_last, older_s=days * DAY_S, now=NOW)
    for run in runs:
        newer = sum(other.name == run.name and other.changed > run.changed for other in runs)
        assert (run in gone) is (newer >= keep_last and run.changed <= NOW - days * DAY_S)


@given(stored(), st.integers(0, 4), st.integers(0, 90))
def test_a_stricter_rule_removes_no_more(runs: list[StoredRun], keep_last: int, days: int) -> None:
    gone = outdated(runs, keep_last=keep_last, older_s=days * DAY_S, now=NOW)
    for more, older in ((1, 0), (0, 1), (1, 1)):
        stricter = outdated(runs, keep_last=keep_last + more, older_s=(days + older) * DAY_S, now=NOW)
        assert {run.run for run in stricter} <= {run.run for run in gone}


def aged(run: Path, days: float) -> Path:
    """A run whose files last changed so many days ago."""
    then = time.time() - days * DAY_S
    for path in run.rglob("*"):
        os.utime(path, (then, then))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three old runs of a job and a young one, an old one of another, and what else lies in a folder of runs."""
    folder = tmp_path / "runs"
    for name, days in (("a-1", 50), ("a-2", 40), ("a-3", 35), ("a-4", 1)):
        aged(record(folder / name, name="a"), days)
    aged(record(folder / "b-1", name="b"), 60)
    (folder / "data" / "shards").mkdir(parents=True)
    (folder / "data" / "shards" / MANIFEST).write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "notes.txt").touch()
    return folder


def clean(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[str], dict[str, str]]:
    """The names of runs that go, and why others are left."""
    capsys.readouterr()
    main(["runs", "clean", *map(str, arguments), "--json"])
    found = json.loads(capsys.readouterr().out)
    return [Path(one["run"]).name for one in found["runs"]], {Path(o["run"]).name: o["why"] for o in found["left"]}


def content(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (["--keep-last", "1"], ["a-1", "a-2", "a-3"]),
        (["--older", "30d"], ["a-1", "a-2", "a-3", "b-1"]),
        (["--keep-last", "2", "--older", "6w"], ["a-1"]),
        (["--keep-last", "4"], []),
        (["--older", "2400h"], []),
    ],
)
def test_without_yes_nothing_changes_and_with_it_what_was_listed_goes(
    runs: Path, capsys: pytest.CaptureFixture[str], rule: list[str], names: list[str]
) -> None:
    before = content(runs.parent)
    sizes = {run.run.name: run.size_bytes for run in stored_runs(runs)}
    assert clean(capsys, runs, *rule) == (names, {})
    assert content(runs.parent) == before
    main(["runs", "clean", str(runs), *rule])
    said = capsys.readouterr().out
    assert ("--yes does it" in said) is bool(names)
    assert clean(capsys, runs, *rule, "--yes") == (names, {})
    gone = [runs / name for name in names]
    assert content(runs.parent).keys() == {
        path for path in before if not any(path == run or run in path.parents for run in gone)
    }
    assert all(sizes[name] > 0 for name in names)


def test_bytes_are_those_of_its_files(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "clean", str(runs), "--older", "8w", "--json"])
    found = json.loads(capsys.readouterr().out)
    (one,) = found["runs"]
    assert one["bytes"] == found["bytes"] == sum(p.stat().st_size for p in (runs / "b-1").rglob("*") if p.is_file())


def test_a_run_at_work_or_read_stays(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = runs / "a-2" / CHECKPOINTS / step_name(3)
    checkpoint.mkdir(parents=True)
    write_meta(checkpoint, {"step": 3}, {})
    aged(runs / "a-2", 40)
    with exclusive_lock(runs / "a-1"), kept(checkpoint):
        gone, left = clean(capsys, runs, "--keep-last", "1", "--yes")
    assert (gone, left["a-1"]) == (["a-3"], "it is at work")
    assert left["a-2"] == f"{checkpoint}: another process reads it; want its end first"
    assert sorted(path.name for path in find_runs(runs)) == ["a-1", "a-2", "a-4", "b-1"]
    assert clean(capsys, runs, "--keep-last", "1", "--yes") == (["a-1", "a-2"], {})


def test_a_run_that_goes_on_between_the_look_and_the_removal_stays(runs: Path) -> None:
    (found,) = [one for one in stored_runs(runs) if one.run.name == "a-1"]
    record(runs / "a-1", name="a", steps=14, first=12)
    with pytest.raises(ValueError, match="it has changed meanwhile"):
        remove(found)
    assert open_run_folder(runs / "a-1")[0].steps == 14


def test_what_is_no_run_of_its_own_stays(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (runs / "a-1" / "data").mkdir()
    (runs / "a-1" / "data" / MANIFEST).write_text("{}")
    shutil.copytree(runs / "b-1", runs / "a-2" / "inner")
    (runs / "a-3" / JOB).write_text(read_sealed_text(runs / "a-3" / JOB))
    (runs / "mine").mkdir()
    (runs / "mine" / JOB).write_text("name: mine\n")
    elsewhere = aged(record(tmp_path / "elsewhere" / "c-1", name="c"), 70)
    (runs / "linked").symlink_to(elsewhere)
    (runs / "folder").symlink_to(elsewhere.parent)
    for name in ("a-1", "a-2", "a-3", "mine"):
        aged(runs / name, 50)
    aged(record(runs / "sweeps" / "d-1", name="d"), 70)
    before = content(tmp_path)
    gone, left = clean(capsys, runs, "--older", "30d", "--yes")
    assert gone == ["b-1"]
    assert {name: why.partition(" (")[0] for name, why in left.items()} == {
        "a-1": "token shards are in it",
        "a-2": "another run folder is in it",
        "a-3": "damaged, and so perhaps no run folder",
        "mine": "not a run folder",
        "linked": "a link leads there",
        "c-1": "a link leads there",
    }
    assert content(tmp_path).keys() == {p for p in before if p != runs / "b-1" and runs / "b-1" not in p.parents}


def test_a_damaged_run_does_not_push_a_good_one_out_of_the_last(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "a-4" / DATA).write_text("cut")
    gone, left = clean(capsys, runs, "--keep-last", "1")
    assert (gone, [*left]) == (["a-1", "a-2"], ["a-4"])


def test_a_removal_that_was_broken_off_is_done_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs / "b-1" / "deep"
    folder.mkdir()
    (folder / "file").touch()
    aged(runs / "b-1", 60)
    (found,) = [one for one in stored_runs(runs) if one.run.name == "b-1"]

    rmtree = shutil.rmtree

    def fail(path: Path) -> None:
        if path.name == STEPS:
            raise PermissionError(13, "Permission denied", str(path))
        rmtree(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", fail)
        with pytest.raises(PermissionError):
            remove(found)
    assert not folder.exists()
    aged(runs / "b-1", 60)
    assert clean(capsys, runs, "--older", "8w", "--yes") == (["b-1"], {})
    assert not (runs / "b-1").exists()


def test_what_is_wrong_is_one_sentence(runs: Path, complaint) -> None:
    wanted = "runs clean: want --keep-last N, --older AGE or both, which say which runs go"
    assert complaint("runs", "clean", runs) == wanted
    assert complaint("runs", "clean", runs, "--yes") == wanted
    assert complaint("runs", "clean", runs / "notes", "--older", "1d").startswith(f"{runs}/notes: no run folder in it")
    assert complaint("runs", "clean", runs / "no", "--older", "1d").startswith(f"{runs}/no: no such folder")
    for text in ("30", "0d", "d", "-1d", "1 d", "9999999d", "30m"):
        said = complaint("runs", "clean", runs, f"--older={text}")
        assert said.startswith(f"--older: want an age such as 12h, 30d or 8w, got '{text}'; see tokendrop runs clean")
    assert complaint("runs", "clean", runs, "--keep-last", "0").startswith("--keep-last: want a whole number of at ")
