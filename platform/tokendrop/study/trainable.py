"""One trial in Tune's own process: its run in a thread, and how far that has come."""

import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.elastic.control import CONTROL, RunControl
from tokendrop.errors import UserError, first_line
from tokendrop.launch.trainer import Fit, fit_in_this_process, fit_on_ray_train, needs_ray_train, run_training
from tokendrop.launch.worker import WorkerSpec
from tokendrop.track.journal import MetricsTail

RUN, SUMMARY, FAILURE, DETAILS = "run", "summary", "failure", "details"
"""What a trial is told, and what its last report has: the one or the other, and a traceback."""
_REPORT_EVERY_S, _STOP_EVERY_S = 1.0, 0.2


class TrialRun(tune.Trainable):
    """Trains the run that it is told, and reports every second how far that is.

    A run that fails is a report of why, not an error: Tune would try it again and again, which helps only those whose
    process is lost. To stop it saves a checkpoint.
    """

    def setup(self, config: dict[str, Any], trials: Mapping[str, ExperimentConfig], sweep: str) -> None:  # pyright: ignore
        self._trials, self._sweep = trials, sweep
        self._run: str = config[RUN]
        self._ended: Future[dict[str, Any]] | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Get ready for the next trial in this process, which has imported all it needs."""
        self.cleanup()
        self._run, self._ended = new_config[RUN], None
        return True

    def step(self) -> dict[str, Any]:
        """How far the run is, after a second or at its end."""
        # not before: Tune may set up two processes for a trial, and let one of them go
        ended = self._ended = self._ended or self._begin()
        with suppress(TimeoutError):
            ended.result(timeout=_REPORT_EVERY_S)
        is_over = ended.done()
        for line in self._tail.read(limit=-1):
            self._take_in(line)
        return {**self._report, "done": is_over, **(ended.result() if is_over else {})}

    def _begin(self) -> Future[dict[str, Any]]:
        config = self._trials[self._run]
        self._folder = Path(config.runs_folder) / self._run
        self._task = config.task
        self._tail = MetricsTail(self._folder)
        self._tail.skip()
        self._report: dict[str, Any] = {}
        ended: Future[dict[str, Any]] = Future()
        threading.Thread(target=_train, args=(config, self._sweep, ended), daemon=True).start()
        return ended

    def _take_in(self, line: Mapping[str, Any]) -> None:
        if "step" not in line:
            return
        self._report |= {key: line[key] for key in ("step", "loss", "layer_tokens")}
        if line["val_loss"] is not None:
            figures = self._task.figures(line["val_loss"], line["val_figures"] or {})
            self._report |= {"val_loss": line["val_loss"], **{f"val_{name}": value for name, value in figures.items()}}

    def cleanup(self) -> None:
        """Let the run save a checkpoint and end."""
        while self._ended is not None and not self._ended.done():
            if (self._folder / CONTROL).is_dir():
                RunControl(self._folder).stop()
            with suppress(TimeoutError):
                self._ended.result(timeout=_STOP_EVERY_S)


def _train(config: ExperimentConfig, sweep: str, ended: Future[dict[str, Any]]) -> None:
    fit = fit_on_ray_train if needs_ray_train(config) else fit_in_this_process
    try:
        ended.set_result({SUMMARY: run_training(config, fit=_telling_stops(fit), sweep=sweep)})
    except KeyboardInterrupt:
        ended.set_result({})
    except UserError as error:
        ended.set_result({FAILURE: str(error), DETAILS: ""})
    except BaseException as error:  # of a library, of a device: the other trials go on
        told = f"{type(error).__name__}: {first_line(error)}"
        ended.set_result({FAILURE: told, DETAILS: traceback.format_exc()})


def _telling_stops(fit: Fit) -> Fit:
    """The same, but a run that was stopped is no run that has ended."""

    def train(spec: WorkerSpec, control: Any) -> None:
        fit(spec, control)
        if control.is_stopped:
            raise KeyboardInterrupt

    return train
