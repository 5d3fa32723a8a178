"""Follows a run from outside of its workers: the live line, Prometheus, and MLflow."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import first_line
from tokendrop.launch.room import resources_of, waiting_text
from tokendrop.output import StatusLine, log
from tokendrop.secrets import redact_all
from tokendrop.track.journal import MetricsTail
from tokendrop.track.mlflow import MlflowMirror, Status
from tokendrop.track.prometheus import RunExport, set_gauges
from tokendrop.track.run_metrics import Series

_POLL_S, _MIRROR_EVERY_S = 0.5, 15.0
_FIRST_S = 30.0  # for a tracking server, before training starts without it
_HURRY_S = 1.5  # for a tracking server, twice, where the user has stopped the run
_WAIT_S, _WAIT_AGAIN_S = 4.0, 60.0  # until it is said what workers wait for, and said again


class Watcher:
    """While its block runs, one thread shows and exports the run's progress, another mirrors it to MLflow."""

    def __init__(self, run: Path, config: ExperimentConfig, mirror: MlflowMirror | None, *, sweep: str = "") -> None:
        """
        Args:
            sweep: the name of the one that the run is a trial of.
        """
        self.run, self.config, self.mirror = run, config, mirror
        self._tail = MetricsTail(run, (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0)
        self._line, self._export = LiveLine(config), RunExport(run, config, sweep)
        self._stop = threading.Event()
        self._showing = threading.Thread(target=self._show, daemon=True)
        self._mirroring = threading.Thread(target=self._mirror_on, daemon=True)
        self._is_known = threading.Event()
        self._complained = False

    def __enter__(self) -> "Watcher":
        log(f"run      {self.run}")
        self._mirroring.start()
        self._is_known.wait(_FIRST_S)  # creating MLflow's tables would slow the first steps down
        self._line.wait()
        self._showing.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._stop.set()
        is_stopped = kind is KeyboardInterrupt
        within_s = _HURRY_S if is_stopped else None
        self._showing.join(_HURRY_S)
        self._line.end()
        self._mirroring.join(within_s)
        if not self._mirroring.is_alive():
            status: Status = "FINISHED" if kind is None else "KILLED" if is_stopped else "FAILED"
            last = threading.Thread(target=self._mirror, args=(status,), daemon=True)
            last.start()
            last.join(within_s)

    def _show(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_POLL_S)
            for line in self._tail.read():
                self._line.show(line)
                self._export.take(line)
            with suppress(Exception):  # of a Ray or a disk that is going
                self._export.export(now=stopping)
            if not stopping:
                with suppress(Exception):  # of a Ray that is going; the live line goes on
                    self._line.show_waiting()

    def give_up(self) -> None:
        """Tell MLflow that the run has failed, where its server answers in time; the process ends next."""
        self._line.end()
        last = threading.Thread(target=self._mirror, args=("FAILED",), daemon=True)
        last.start()
        last.join(_HURRY_S)

    def _mirror_on(self) -> None:
        self._mirror("RUNNING")
        self._is_known.set()
        while not self._stop.wait(_MIRROR_EVERY_S):
            self._mirror()

    def _mirror(self, status: Status | None = None) -> None:
        if self.mirror is None:
            return
        try:
            self.mirror.sync(status)
            self._complained = False
        except Exception as error:  # tracking must never fail a run, whatever a server or its client does
            if not self._complained or status == "FINISHED":
                log(f"mlflow   not reached ({first_line(error)}); `tokendrop sync {self.run}` sends what waits there")
            self._complained = True


class LiveLine:
    """The state of training in one line: step, loss, speed, kept length, saving, time left."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.plan, self.scaling = config.plan, config.scaling
        self._line = StatusLine()
        self._step_time_s: float | None = None
        self._val_loss: float | None = None
        self._attempts = 0
        self._is_paused = False
        self._done = 0
        self._waits_since: float | None = None
        self._waits_told = 0.0

    def wait(self) -> None:
        """From now on, workers are waited for."""
        self._waits_since, self._waits_told = time.monotonic(), 0.0

    def show_waiting(self) -> None:
        """Say what workers wait for, when they have not started for a while."""
        waited_s = time.monotonic() - self._waits_since if self._waits_since is not None else 0.0
        if waited_s >= (self._waits_told + _WAIT_AGAIN_S if self._waits_told else _WAIT_S):
            self._waits_told = waited_s
            workers = self.plan.at(min(self._done, self.plan.steps - 1)).workers
            log(waiting_text(workers, resources_of(self.scaling)))

    def show(self, line: dict[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        if "driver_from" in line:
            return
        if "lost" in line:
            log(f"lost     a worker: {line['lost']}")
            self.wait()
            return
        if "attempt_from" in line:
            self._attempts, self._done, self._waits_since = self._attempts + 1, line["attempt_from"], None
            if self._attempts > 1 and not self._is_paused:
                log(f"restart  a worker was lost; {line['world_size']} workers go on from step {line['attempt_from']}")
            return
        if "resize_at" in line:
            log(resize_text(line))
            return
        self._is_paused = "paused_at" in line
        if self._is_paused:
            self._done = line["paused_at"]
            self.wait()
            return
        self._done, self._waits_since = line["step"], None
        last = self._step_time_s or line["step_time_s"]
        self._step_time_s = 0.9 * last + 0.1 * line["step_time_s"]
        self._val_loss = line["val_loss"] if line["val_loss"] is not None else self._val_loss
        share, is_last = line["step"] / self.plan.steps, line["step"] == self.plan.steps
        self._line.show(lambda: self._text(line), share=share, always=is_last)

    def end(self) -> None:
        """Leave the line as it is."""
        self._line.end()

    def _text(self, line: dict[str, Any]) -> str:
        step, plan = line["step"], self.plan
        full = plan.layer_tokens_full * step // plan.steps
        left = round(self._time_left(step))
        parts = [
            f"step {step}/{plan.steps}",
            f"loss {line['loss']:.3f}",
            f"val {self._val_loss:.3f}" if self._val_loss is not None else "",
            f"{plan.tokens_per_step / line['step_time_s']:,.0f} tok/s",
            f"kept {line['kept_length']}/{plan.shape.sequence_length}",
            f"layer tokens saved {1 - line['layer_tokens'] / full:.1%}",
            f"ETA {left // 60}:{left % 60:02}",
        ]
        return "  ".join(filter(None, parts))

    def _time_left(self, step: int) -> float:
        """By FLOPs: steps get longer as the kept length grows."""
        assert self._step_time_s is not None
        per_flop = self._step_time_s / self.plan.at(step - 1).flops_per_step
        return (self.plan.flops(self.plan.steps) - self.plan.flops(step)) * per_flop


def resize_text(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl on a change of workers: what it took, by the parts that took time."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in line["parts_s"].items() if seconds >= 0.05)
    sizes = f"{line['from']} -> {line['to']}"
    return f"resize   {sizes} workers at step {line['resize_at']}: {line['pause_s']:.1f} s ({parts})"


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
