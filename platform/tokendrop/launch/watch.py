"""Follows a run from outside of its workers: the live line, Prometheus, and MLflow."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError, first_line
from tokendrop.launch.follow import last_saved, show_view
from tokendrop.launch.room import resources_of, waiting_text
from tokendrop.launch.view import RunView
from tokendrop.output import StatusLine, is_terminal, log
from tokendrop.secrets import redact_all
from tokendrop.track.decisions import DecidedJob
from tokendrop.track.journal import MetricsTail
from tokendrop.track.mlflow import MlflowMirror, Status
from tokendrop.track.prometheus import RunExport, set_gauges
from tokendrop.track.run_home import place_of
from tokendrop.track.run_metrics import Series

_POLL_S, _MIRROR_EVERY_S = 0.5, 15.0
_FIRST_S = 30.0  # for a tracking server, before training starts without it
_HURRY_S = 1.5  # for a tracking server, twice, where the user has stopped the run
_WAIT_S, _WAIT_AGAIN_S = 4.0, 60.0  # until it is looked at what workers wait for, and until the same is said again


class Watcher:
    """While its block runs, one thread shows and exports the run's progress, another mirrors it to MLflow."""

    def __init__(self, run: Path, config: ExperimentConfig, mirror: MlflowMirror | None) -> None:
        self.run, self.config, self.mirror = run, config, mirror
        self._tail = MetricsTail(run, (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0)
        self._line, self._export = LiveLine(config, run), RunExport(run, config)
        self._decided = DecidedJob(config, run)
        self._stop = threading.Event()
        self._showing = threading.Thread(target=self._show, daemon=True)
        self._mirroring = threading.Thread(target=self._mirror_on, daemon=True)
        self._is_known, self._one_at_a_time = threading.Event(), threading.Lock()
        self._complained = False

    def __enter__(self) -> "Watcher":
        log(f"run      {place_of(self.run)}")
        self._mirroring.start()
        self._line.wait()
        self._showing.start()
        return self

    def wait_for_tracking(self) -> None:
        """Wait until MLflow knows the run: steps in this process would be slowed down by its imports and its tables."""
        self._is_known.wait(_FIRST_S)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._stop.set()
        is_stopped = kind is KeyboardInterrupt
        within_s = _HURRY_S if is_stopped else None
        self._showing.join(_HURRY_S)
        self._line.end()
        self._mirroring.join(within_s)
        self._mirror_last("FINISHED" if kind is None else "KILLED" if is_stopped else "FAILED", within_s)

    def _show(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_POLL_S)
            lines = self._tail.read()
            with suppress(UserError):  # a damaged file, which the workers will tell of
                if self._decided.renew():  # after the lines were read, so that the plan knows of their steps
                    self._line.view.follow(self._decided.config)
                    self._export.metrics.follow(self._decided.config)
            for line in lines:
                self._line.show(line)
                self._export.take(line)
            self._line.refresh()
            with suppress(Exception):  # of a Ray or a disk that is going
                self._export.export(now=stopping)
            if not stopping:
                with suppress(Exception):  # of a Ray that is going; the live line goes on
                    self._line.show_waiting()

    def give_up(self) -> None:
        """Tell MLflow that the run has failed, where its server answers in time; the process ends next."""
        self._line.end()
        self._mirror_last("FAILED", _HURRY_S)

    def _mirror_last(self, status: Status, within_s: float | None) -> None:
        last = threading.Thread(target=self._mirror, args=(status,), daemon=True)
        last.start()
        last.join(within_s)
        if last.is_alive():
            log(f"mlflow   not reached in time; `tokendrop sync {self.run}` sends what waits there")

    def _mirror_on(self) -> None:
        self._mirror("RUNNING")
        self._is_known.set()
        while not self._stop.wait(_MIRROR_EVERY_S):
            self._mirror()

    def _mirror(self, status: Status | None = None) -> None:
        if self.mirror is None:
            return
        try:
            if status is not None:
                self.mirror.note_status(status)  # which stays where the server takes too long
            with self._one_at_a_time:  # the end of a run may come while its begin is told
                self.mirror.sync()
            self._complained = False
        except Exception as error:  # tracking must never fail a run, whatever a server or its client does
            if not self._complained or status == "FINISHED":
                log(f"mlflow   not reached ({first_line(error)}); `tokendrop sync {self.run}` sends what waits there")
            self._complained = True


class LiveLine:
    """The state of training as it goes: in one line, or in a panel on a terminal."""

    def __init__(self, config: ExperimentConfig, run: Path | None = None) -> None:
        """
        Args:
            run: its folder, for what is said of its checkpoints.
        """
        self.view, self.run, self.scaling = RunView(config), run, config.scaling
        self._line = StatusLine()
        self._waits_since: float | None = None
        self._waits_look = self._waits_told = 0.0  # seconds waited, at the next look and at the last word
        self._waits_for = ""

    def wait(self) -> None:
        """From now on, workers are waited for."""
        self._waits_since, self._waits_look, self._waits_for = time.monotonic(), _WAIT_S, ""

    def show_waiting(self) -> None:
        """Say what workers wait for, when they have not started for a while, and when it is something else."""
        if self._waits_since is None or (waited_s := time.monotonic() - self._waits_since) < self._waits_look:
            return
        self._waits_look = waited_s + _WAIT_S
        plan = self.view.plan
        workers = plan.at(min(self.view.done, plan.steps - 1)).workers
        text = waiting_text(workers, resources_of(self.scaling))
        waits_for, _, _ = text.partition(":")  # without what is free, which comes and goes
        if waits_for != self._waits_for or waited_s >= self._waits_told + _WAIT_AGAIN_S:
            self._waits_for, self._waits_told = waits_for, waited_s
            log(text)

    def show(self, line: dict[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        if said := self.view.take(line):
            log(said)
        if "lost" in line or "paused_at" in line:
            self.wait()
        elif "attempt_from" in line or "step" in line:
            self._waits_since = None
        if "step" in line:
            show_view(self._line, self.view, always=line["step"] == self.view.plan.steps)

    def refresh(self) -> None:
        """Bring what ages up to date."""
        if self.run is not None and self.view.has_steps and is_terminal():
            self.view.saved = last_saved(self.run)
            show_view(self._line, self.view)

    def end(self) -> None:
        """Leave the line as it is."""
        self._line.end()


@contextmanager
def prepare_line(config: ExperimentConfig) -> Generator[Callable[[int, int], None]]:
    """The state of preparing a job's token shards, in one line and exported: it takes documents and tokens."""
    line = StatusLine(at_once=False)

    def tell(documents: int, tokens: int) -> None:
        line.show(lambda: f"prepare  {documents:,} documents, {tokens:,} tokens")
        values: dict[Series, float] = {("prepare/documents", ()): documents, ("prepare/tokens", ()): tokens}
        with suppress(Exception):
            set_gauges(values, redact_all({"job_name": config.name}))

    try:
        yield tell
    finally:
        line.end()
