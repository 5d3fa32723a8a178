"""What long work shows of itself, on a terminal and elsewhere."""

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from terminals import screen

PLATFORM = Path(__file__).parents[1] / "platform"
WORK = """
import time
from tokendrop.output import StatusLine, log, print_text, results_alone

with results_alone():
    train, prepare = StatusLine(), StatusLine()
    for step in range(4):
        train.show(lambda: f"step {step}/3  [loss] 5.612 hidden at https://me:pass@host", share=step / 3, always=True)
        prepare.show(lambda: f"prepare  {step} documents", always=True)
        if step == 1:
            log("lost     a worker")
        if step == 2:
            print("a line of a library")
            prepare.end()
    train.end()
    train.show(lambda: "after the end", always=True)
    log("done")
    print_text("the result")
"""


def run(stderr: int, term: str = "xterm") -> str:
    """Do the work; its standard output."""
    env = {"PYTHONPATH": str(PLATFORM), "TERM": term, "LANG": "C.UTF-8"}
    return subprocess.run(
        [sys.executable, "-c", WORK], env=env, stdin=subprocess.DEVNULL, stdout=-1, stderr=stderr, text=True, check=True
    ).stdout


def on_terminal(columns: int, term: str = "xterm") -> tuple[str, str]:
    """Standard output of the work, and what it wrote to a terminal."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, columns))
    out = run(slave, term)
    os.close(slave)
    written = b""
    try:
        while some := os.read(master, 2**16):
            written += some
    except OSError:  # the end of a terminal
        pass
    os.close(master)
    return out, written.decode()


LAST = "step 3/3  [loss] 5.612 hidden at https://<hidden>@host"


@pytest.mark.parametrize("columns", [200, 30])
def test_a_terminal_keeps_what_was_logged_and_the_last_state_of_each_work(columns: int) -> None:
    out, written = on_terminal(columns)
    assert out == "the result\n"
    assert screen(written) == ["lost     a worker", "a line of a library", "prepare  2 documents", LAST, "done"]
    assert "\u2501" in written  # a bar moved
    assert "\x1b[?25h" in written[written.rfind("\x1b[?25l") : written.find("\u2501")]  # a kill leaves the cursor
    assert "pass" not in written


@pytest.mark.parametrize("is_dumb", [False, True])
def test_elsewhere_states_are_plain_lines(is_dumb: bool, tmp_path: Path) -> None:
    if is_dumb:
        out, written = on_terminal(30, "dumb")
    else:
        with (tmp_path / "err").open("w") as file:
            out = run(file.fileno())
        written = (tmp_path / "err").read_text()
    assert out == "the result\n"
    lines = written.splitlines()
    assert len(lines) == 4 + 3 + 3
    assert lines[-2:] == [LAST, "done"]
    assert "\x1b" not in written
