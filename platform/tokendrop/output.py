"""What people and scripts see: results on standard output; a log, and how far work has come, on standard error."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from tokendrop.secrets import redact, redact_all

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


@contextmanager
def results_alone() -> Iterator[None]:
    """Keep standard output for what this module prints; what libraries print there goes to standard error.

    Ray prints warnings of the whole cluster on a driver's standard output, whatever `log_to_driver` says.
    """
    token = _results.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)


def results() -> TextIO:
    """The stream that results go to."""
    return _results.get() or sys.stdout


def print_json(result: Mapping[str, Any], *, is_corpus: bool = False) -> None:
    """One JSON object on standard output; null for a number that is not finite, which JSON can't say.

    Args:
        is_corpus: whether it holds text of a corpus, which is shown as it is.
    """
    print(json_text(result if is_corpus else redact_all(result)), file=results())


def json_text(value: Any) -> str:
    """JSON; null for a number that is not finite, which JSON can't say."""
    return json.dumps(_finite(value), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_text(text: str, *, is_corpus: bool = False) -> None:
    """A result on standard output.

    Args:
        is_corpus: whether it holds text of a corpus, which is shown as it is.
    """
    print(text if is_corpus else redact(text), file=results())


def log(text: str) -> None:
    """A line on standard error, beside the results on standard output."""
    print(redact(text), file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Whether standard error is a terminal on which lines can be written over."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class StatusLine:
    """How far long work has come, on standard error: a bar that moves on a terminal, a line now and then elsewhere."""

    def __init__(self, *, at_once: bool = True) -> None:
        """
        Args:
            at_once: whether the first state is shown; else only work that takes a while is spoken of.
        """
        self._terminal = _TERMINAL if is_terminal() else None
        self._every_s = 0.1 if self._terminal else 10.0
        self._due = 0.0 if at_once else time.monotonic() + self._every_s
        self._is_ended = False

    def show(
        self,
        text: Callable[[], str],
        *,
        share: float | None = None,
        panel: Callable[[], str] | None = None,
        always: bool = False,
    ) -> bool:
        """Show a state, when one is due or `always`; nothing after `end`.

        Args:
            text: makes its text.
            share: of the work, how much is done; None where nobody knows how much there is.
            panel: makes the lines that a terminal shows in its place, until the end.
        Returns:
            Whether it was shown.
        """
        now = time.monotonic()
        if self._is_ended or not (always or now >= self._due):
            return False
        self._due = now + self._every_s
        if self._terminal:
            self._terminal.show(self, _State(redact(text()), share, redact(panel()) if panel else ""))
        else:
            log(text())
        return True

    def end(self) -> None:
        """Leave the last state as a line."""
        self._is_ended = True
        if self._terminal:
            self._terminal.end(self)


@dataclass(frozen=True, slots=True)
class _State:
    text: str
    share: float | None
    panel: str = ""


class _Terminal:
    """The status lines of all threads, at the foot of the terminal; all other output goes above them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[StatusLine, _State] = {}
        self._live: Live | None = None

    def show(self, line: StatusLine, state: _State) -> None:
        with self._lock:
            self._states[line] = state
            self._live = self._live or _start_live()
            self._live.update(_bars(self._states.values()), refresh=True)

    def end(self, line: StatusLine) -> None:
        with self._lock:
            if line not in self._states or self._live is None:
                return
            text = self._states.pop(line).text
            self._live.update(_bars(self._states.values()))
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            if not self._states:
                self._live.stop()
                self._live = None


def _start_live() -> "Live":
    from rich.console import Console
    from rich.live import Live

    to_stderr = sys.stdout is sys.stderr  # as in `results_alone`
    live = Live(console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=to_stderr)
    live.start()
    live.console.show_cursor()  # which a process that is killed would leave hidden
    return live


def _bars(states: Iterable[_State]) -> "Table":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 1))
    for state in states:
        bar = "" if state.share is None else ProgressBar(total=1, completed=state.share, width=16)
        text = Text(state.panel, no_wrap=True, overflow="crop") if state.panel else Text(state.text)
        rows.add_row(bar, text)
    return rows


_TERMINAL = _Terminal()


@contextmanager
def progress_line(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """How far work that takes a while has come: what this gives takes the units done and those there are.

    Args:
        what: is done, as the line begins.
        unit: in the plural, as the line ends.
    """
    line = StatusLine(at_once=False)

    def show(done: int, size: int) -> None:
        share = done / max(1, size)
        line.show(lambda: f"{what}  {share:.0%} of {count(size)} {unit}", share=share)

    try:
        yield show
    finally:
        line.end()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their text; the first one to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def decimals(number: float) -> str:
    """1234.567 as 1,234.57, and 0.0012345 as 0.00123: small ones are not 0."""
    return f"{number:,.2f}" if number >= 0.1 or not number else f"{number:.3g}"


def count(number: float) -> str:
    """1234567 as 1.23M."""
    units = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    for size, unit in units:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
