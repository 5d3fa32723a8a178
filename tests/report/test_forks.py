"""What lists and reports tell of a fork."""

import json
import shlex
from pathlib import Path

import pytest

from recorded import record
from tokendrop.cli.main import main, parse
from tokendrop.errors import DamagedDataError
from tokendrop.report.arms import arms_of
from tokendrop.report.listing import overview
from tokendrop.report.record import read_record
from tokendrop.report.tables import again
from tokendrop.track.lineage import FORKED_WITH, LINEAGE, Lineage, read_lineage, write_lineage

AT = 4
OVERRIDES = ("run=child", "train.peak_lr=0.02", "track.uri=https://me:hunter2@host")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run, a fork of it, and a run that was trained from its first step on as that fork is from its fourth."""
    folder = tmp_path / "runs"
    parent = record(folder / "parent")
    record(folder / "child", train__peak_lr=0.02)
    record(folder / "throughout", train__peak_lr=0.02)
    changed = {"train.peak_lr": ("0.01", "0.02")}
    write_lineage(folder / "child", Lineage(parent=str(parent), step=AT, overrides=OVERRIDES, changed=changed))
    return folder


def test_what_is_written_is_read_back_without_secrets(runs: Path) -> None:
    lineage = read_lineage(runs / "child")
    assert lineage is not None
    assert (lineage.parent, lineage.name, lineage.step) == (str(runs / "parent"), "parent", AT)
    assert lineage.changed == {"train.peak_lr": ("0.01", "0.02")}
    assert "hunter2" not in (runs / "child" / LINEAGE).read_text()
    assert lineage.tags[FORKED_WITH] == "run=child train.peak_lr=0.02 track.uri=https://<hidden>@host"
    assert read_lineage(runs / "parent") is None
    for text in ("{}", "", '{"step": 4}'):
        (runs / "child" / LINEAGE).write_text(text)
        with pytest.raises(DamagedDataError, match=LINEAGE):
            read_lineage(runs / "child")
        assert overview(runs / "child").state == "finished"


def test_lists_show_where_a_fork_comes_from(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", str(runs)])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["child"].rstrip().endswith(f"parent, step {AT}")
    assert not any("step" in lines[name] for name in ("parent", "throughout"))
    main(["runs", str(runs), "--where", f"forked_at={AT}", "--json"])
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (listed["forked_from"], listed["forked_at"]) == (str(runs / "parent"), AT)
    main(["runs", str(runs / "parent"), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["forked_from"] is None
    main(["runs", "show", str(runs / "child")])
    assert "train.peak_lr  0.01, and 0.02 from there on\n" in capsys.readouterr().out
    main(["runs", "show", str(runs / "child"), "--json"])
    assert json.loads(capsys.readouterr().out)["changed"] == {"train.peak_lr": ["0.01", "0.02"]}


def test_a_fork_is_an_arm_of_its_own_and_made_again_as_a_fork(runs: Path) -> None:
    records = [read_record(runs / name) for name in ("parent", "child", "throughout")]
    arms = arms_of(records)
    assert [arm.label for arm in arms][1] == f"tiny peak_lr=0.02 forked_from=parent forked_at={AT}"
    assert [[run.folder.name for run in arm.runs] for arm in arms] == [["parent"], ["child"], ["throughout"]]
    (note,) = records[1].notes()
    assert note.startswith(f"child is a fork of parent at step {AT}, with train.peak_lr=0.02, not 0.01; its record")
    assert [run.notes() for run in (records[0], records[2])] == [[], []]
    assert (AT, "fork, of parent") in records[1].marks()
    commands = [shlex.split(arm["command"])[1:] for arm in again(arms)]
    assert commands[0] == ["train", str(runs / "parent" / "job.yaml")]
    options = parse(commands[1])
    assert (options.run_folder, options.at, options.overrides[1]) == (runs / "parent", AT, "train.peak_lr=0.02")


def test_the_page_tells_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair")
    page = runs / "report.html"
    main(["report", str(runs), "--to", str(page), "--json"])
    assert any(note.startswith("child is a fork of parent") for note in json.loads(capsys.readouterr().out)["notes"])
    assert f"tokendrop fork {runs / 'parent'} --at {AT} run=child" in page.read_text()
