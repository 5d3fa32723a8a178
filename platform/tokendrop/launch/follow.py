"""Follows a run from its folder alone, without Ray, on any machine that sees it."""

import time
from pathlib import Path

from tokendrop.atomic import is_locked
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.elastic.control import RunControl
from tokendrop.launch.view import RunView, clock
from tokendrop.output import StatusLine, is_terminal, log
from tokendrop.track.decisions import DecidedJob
from tokendrop.track.journal import METRICS, MetricsTail
from tokendrop.track.run_folder import DATA, open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, committed, step_of

_POLL_S = 0.5
_HISTORY_BYTES = 2**22  # of the record's end, some ten thousand steps
_QUIET_S, _QUIET_STEPS = 60.0, 10  # without a step, before that is told: so many seconds, and so many steps' time
_UNSEEN_S = 20.0  # without a line, before a run without a lock is taken for one that nobody works on


def follow(run: Path) -> None:
    """Show a run as it goes, on standard error, until nobody is at work on it.

    Raises:
        UserError: it is no run folder.
        DamagedDataError: what describes the run was cut or changed since.
    """
    while not (run / DATA).is_file() and is_locked(run):  # it begins just now
        time.sleep(_POLL_S)
    config, _ = open_run_folder(run)
    log(f"run      {run}")
    line, follower = StatusLine(), Follower(run, config)
    try:
        shown = 0
        while True:
            is_over = not follower.is_at_work  # what was written before comes with the next look
            news = follower.update()
            for said in news:
                log(said)
            has_news = follower.view.done != shown or is_terminal()
            if follower.view.has_steps and has_news and show_view(line, follower.view, always=is_over):
                shown = follower.view.done
            if is_over:
                return
            time.sleep(_POLL_S)
    finally:
        line.end()


class Follower:
    """What there is to see of a run in its folder: its record, what its workers are told, its checkpoints."""

    def __init__(self, run: Path, config: ExperimentConfig) -> None:
        self.run, self.view, self.control = run, RunView(config), RunControl(run)
        self._decided = DecidedJob(config, run)
        path = run / METRICS
        self._tail = MetricsTail(run, max(0, path.stat().st_size - _HISTORY_BYTES) if path.exists() else 0)
        self._sees_lock = self._is_unheld = self._tells = False
        self._told = "trains"
        lines = self._tail.read(limit=-1)
        said = [self.view.take(line) for line in lines]
        self._said_before = said[-1:] if self.view.has_lost else []
        ago_s = time.time() - lines[-1].get("time", 0.0) if lines else 0.0
        self._heard = time.monotonic() - max(0.0, ago_s)

    @property
    def is_at_work(self) -> bool:
        """Whether a driver holds the run, or, where its lock is not to be seen, a line came lately."""
        is_locked_now = is_locked(self.run)
        self._sees_lock = self._sees_lock or is_locked_now
        is_done = self.view.done >= self.view.plan.steps
        self._is_unheld = not (self._sees_lock or is_done) and self._silence_s < max(_UNSEEN_S, self._long_s)
        self._tells = is_locked_now or self._is_unheld
        return self._tells

    def update(self) -> list[str]:
        """Take in what is new; what is to be said of it."""
        lines = self._tail.read()
        if self._decided.renew():
            self.view.follow(self._decided.config)
        if lines:
            self._heard = time.monotonic()
        said = [*self._said_before, *(self.view.take(line) for line in lines)]
        self._said_before = []
        self.view.saved = last_saved(self.run)
        kind, self.view.state = self._state()
        if self._tells and kind != self._told and kind in ("quiet", "starts", "stops", "unheld"):
            said.append(f"{kind:8} {self.view.state}")
        self._told = kind
        return [one for one in said if one]

    @property
    def _silence_s(self) -> float:
        return time.monotonic() - self._heard

    @property
    def _long_s(self) -> float:
        """What some steps take, as fast as they are now."""
        view = self.view
        took = view.time.step_s(min(view.done, view.plan.steps - 1), view.workers) if view.workers else None
        return _QUIET_STEPS * (took or 0.0)

    def _state(self) -> tuple[str, str]:
        """What the run is at, in a word and for people."""
        view, silence_s = self.view, self._silence_s
        if self._is_unheld:
            return "unheld", "nobody is seen to work on it; a line of its record is waited for"
        if self.control.is_stopped:
            return "stops", "was told to stop, and saves itself first"
        if view.done >= view.plan.steps:
            return "ends", "trained to the end, and ends"
        if view.is_paused:
            return "resizes", "its workers change"
        if view.has_lost or not view.has_steps:
            return "starts", "its workers start"
        if silence_s > max(_QUIET_S, self._long_s):
            return "quiet", f"no step for {clock(silence_s)}"
        return "trains", "trains"


def show_view(line: StatusLine, view: RunView, *, always: bool = False) -> bool:
    """Show a run's state, when that is due or `always`; whether it was shown."""
    return line.show(view.line, share=view.share, panel=view.panel, always=always)


def last_saved(run: Path) -> tuple[int, float] | None:
    """The step of a run's last checkpoint, and its age in seconds."""
    for checkpoint in reversed(committed(run / CHECKPOINTS)):
        try:
            return step_of(checkpoint), time.time() - (checkpoint / META).stat().st_mtime
        except OSError:  # it was removed meanwhile, or is damaged
            continue
    return None
