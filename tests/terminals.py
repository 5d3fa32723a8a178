"""A terminal of a test's own: what is written to it, and what is to be seen there then."""

import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

LONGEST_WAIT_S = 120


def written_by(
    command: Sequence[str],
    *,
    columns: int,
    environment: Mapping[str, str],
    interrupt_at: str = "",
    typed: Sequence[tuple[str, str]] = (),
) -> tuple[int, str]:
    """Run a command on a terminal; its exit code, and all that it wrote there, with what the terminal echoes.

    Args:
        interrupt_at: as soon as this was written, Ctrl-C is pressed.
        typed: what is typed, one after the other, each as soon as the text before it was written since the last.
    """
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, columns))
    process = subprocess.Popen(command, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    written, deadline, waits = b"", time.monotonic() + LONGEST_WAIT_S, bool(interrupt_at)
    to_type, seen = [*typed], 0
    while some := _read(master, deadline):
        written += some
        if waits and interrupt_at.encode() in written:
            process.send_signal(signal.SIGINT)
            waits = False
        if to_type and (place := written.find(to_type[0][0].encode(), seen)) >= 0:
            seen = place + len(to_type[0][0].encode())
            os.write(master, to_type.pop(0)[1].encode())
    os.close(master)
    return process.wait(10), written.decode()


def _read(terminal: int, deadline: float) -> bytes:
    """What comes next; nothing at the end."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
    assert ready, "nothing came for long"
    try:
        return os.read(terminal, 2**16)
    except OSError:  # the end of a terminal
        return b""


def screen(written: str) -> list[str]:
    """The lines of a terminal that is wide enough, after all was written."""
    lines, row, column = [""], 0, 0
    for erase, up, sequence, text in re.findall(
        r"(\x1b\[2K)|(\x1b\[1A)|(\x1b\[[?\d;]*[a-zA-Z])|(\r|\n|[^\r\n\x1b]+)", written
    ):
        if erase:
            lines[row] = ""
        elif up:
            row -= 1
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif not sequence:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines if line.strip()]
