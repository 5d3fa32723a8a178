"""`tokendrop watch`: a run is followed from its folder, to its end, on a terminal and elsewhere."""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recorded import record
from terminals import screen, written_by
from tokendrop.atomic import exclusive_lock
from tokendrop.cli.main import main
from tokendrop.elastic.control import RunControl
from tokendrop.launch import follow
from tokendrop.launch.follow import Follower, last_saved
from tokendrop.track.journal import METRICS, note_loss, read_steps
from tokendrop.track.run_folder import JOB, open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, step_name, write_meta

PLATFORM = Path(__file__).parents[2] / "platform"
STEPS = 40
COLOR = re.compile(r"\x1b\[[\d;]*3[\d;]*m")


@contextmanager
def training(run: Path, *, before_s: float = 0.0, steps: int = STEPS, pause_s: float = 0.1) -> Iterator[None]:
    """A run at work while the block runs, and until it is trained."""
    run.mkdir(parents=True)
    is_held = threading.Event()

    def train() -> None:
        with exclusive_lock(run):
            is_held.set()
            time.sleep(before_s)
            record(run, steps=steps, pause_s=pause_s, name="watched")

    thread = threading.Thread(target=train)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        thread.join()


def watched(run: Path, *, interrupt_at: str = "", **variables: str) -> tuple[int, str]:
    """Exit code of `tokendrop watch` on a terminal, and what it wrote there."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment = {**kept, "PYTHONPATH": str(PLATFORM), "TERM": "xterm-256color", "LANG": "C.UTF-8", **variables}
    command = [sys.executable, "-m", "tokendrop", "watch", str(run)]
    return written_by(command, columns=200, environment=environment, interrupt_at=interrupt_at)


def test_a_run_is_watched_to_its_end_on_a_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run, before_s=1):
        code, written = watched(run)
    assert code == 0
    steps = [int(step) for step in re.findall(r"step +(\d+) of 40", written)]
    assert steps == sorted(steps)
    assert len({*steps}) > 3
    assert re.search("[▁▂▃▄▅▆▇█]{2}", written)
    first, *_, last, end = screen(written)
    assert (first, end) == (f"run      {run}", f"finished {run}")
    assert last.startswith("step 40/40  loss 2.108  val 2.108  ")
    assert COLOR.search(written)


def test_without_color_there_is_none(tmp_path: Path) -> None:
    record(tmp_path / "run")
    code, written = watched(tmp_path / "run", NO_COLOR="1")
    assert code == 0
    assert "━" in written
    assert not COLOR.search(written)


def test_ctrl_c_leaves_the_run_as_it_is_and_the_terminal_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run):
        code, written = watched(run, interrupt_at="saved     not yet")
        assert len(json.loads((run / METRICS).read_text().splitlines()[-1])) > 3
    assert code == 130
    assert screen(written)[-2:] == ["watch    left; the run goes on as it is", "tokendrop: stopped"]
    assert "\x1b[?25h" in written[written.rfind("\x1b[?25l") :]
    assert len(read_steps(run)) == STEPS


def test_elsewhere_it_is_plain_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with training(run, before_s=1, pause_s=0.02):
        main(["watch", str(run)])
    out, err = capfd.readouterr()
    assert out == f"finished {run}\n"
    first, *lines = err.splitlines()
    assert first == f"run      {run}"
    assert lines[-1].startswith("step 40/40  loss 2.108  val 2.108  ")
    assert len({*lines}) == len(lines)
    assert "\x1b" not in out + err


def test_a_run_that_failed_says_why_and_is_no_success(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(follow, "_UNSEEN_S", 0.0)
    run = record(tmp_path / "run", last=5)
    note_loss(run, "rank 0 (out of memory)")
    with pytest.raises(SystemExit) as end:
        main(["watch", str(run), "--json"])
    out, err = capfd.readouterr()
    assert end.value.code == 1
    assert (json.loads(out)["state"], json.loads(out)["step"]) == ("failed", 5)
    assert "lost     a worker: rank 0 (out of memory)" in err.splitlines()


def test_a_run_that_was_stopped_before_its_first_step_ends(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(follow, "_UNSEEN_S", 0.0)
    run = record(tmp_path / "run", last=0, committed=False)
    with pytest.raises(SystemExit) as end:
        main(["watch", str(run)])
    assert end.value.code == 1
    said = f"stopped  {run} at step 0 of 12; 'tokendrop train --resume {run}' goes on\n"
    assert capfd.readouterr().out == said


def test_a_run_whose_lock_is_not_to_be_seen_is_followed_as_long_as_lines_come(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(follow, "is_locked", lambda run: False)  # as on a file system without locks
    run = record(tmp_path / "run", last=5)
    follower = Follower(run, open_run_folder(run)[0])
    assert follower.is_at_work
    assert follower.update()[0].startswith("unheld   nobody is seen to work on it")
    follower._heard -= 100
    assert not follower.is_at_work
    record(run, first=5, last=8)
    follower.update()
    assert follower.is_at_work
    record(run, first=8)
    follower.update()
    assert not follower.is_at_work


def test_silence_and_the_word_to_stop_are_told_once(tmp_path: Path) -> None:
    run = record(tmp_path / "run", last=5, committed=False)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines() if line]
    lines = [line for line in lines if "paused_at" not in line]
    (run / METRICS).write_text("".join(json.dumps({**line, "time": line["time"] - 100}) + "\n" for line in lines))
    with exclusive_lock(run):
        follower = Follower(run, open_run_folder(run)[0])
        assert follower.is_at_work
        assert [re.sub(r"\d+$", "N", said) for said in follower.update()] == ["quiet    no step for 1:N"]
        assert follower.update() == []
        control = RunControl(run)
        control.reset()
        control.stop()
        assert follower.update() == ["stops    was told to stop, and saves itself first"]
        assert follower.update() == []


def test_a_run_whose_workers_start_says_so(tmp_path: Path) -> None:
    run = record(tmp_path / "run", last=0, committed=False)
    (run / METRICS).write_text("")
    with exclusive_lock(run):
        follower = Follower(run, open_run_folder(run)[0])
        assert follower.is_at_work
        assert follower.update() == ["starts   its workers start"]
        assert follower.update() == []


def test_what_was_lost_and_begun_again_is_told_as_it_happens(tmp_path: Path) -> None:
    run = record(tmp_path / "run", last=4)
    with exclusive_lock(run):
        follower = Follower(run, open_run_folder(run)[0])
        follower.update()
        note_loss(run, "rank 0 (gone)")
        record(run, first=4, last=6, committed=False)
        assert follower.update() == [
            "lost     a worker: rank 0 (gone)",
            "restart  a worker was lost; 1 worker goes on from step 4",
        ]
        assert follower.view.state == "its workers change"  # it was paused at step 6


def test_the_age_of_the_last_checkpoint_is_that_of_its_commit(tmp_path: Path) -> None:
    assert last_saved(tmp_path) is None
    for step, age_s in ((3, 500), (6, 90)):
        checkpoint = tmp_path / CHECKPOINTS / step_name(step)
        checkpoint.mkdir(parents=True)
        write_meta(checkpoint, {"step": step}, {})
        then = time.time() - age_s
        os.utime(checkpoint / "meta.json", (then, then))
    (tmp_path / CHECKPOINTS / step_name(9)).mkdir()  # damaged
    assert last_saved(tmp_path) == (6, pytest.approx(90, abs=5))


def test_what_is_no_run_is_named(tmp_path: Path, complaint) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    for name in ("nowhere", "empty", "foreign"):
        said = complaint("watch", tmp_path / name)
        assert said == f"{tmp_path}/{name}: not a run folder (no job.yaml in it); want one that 'tokendrop train' made"


def test_a_damaged_run_is_named(tmp_path: Path, capfd) -> None:
    run = record(tmp_path / "run")
    (run / JOB).write_text("name: cut")
    with pytest.raises(SystemExit) as end:
        main(["watch", str(run)])
    assert end.value.code == 1
    assert capfd.readouterr().err.startswith(f"tokendrop: {run}/job.yaml: damaged")
