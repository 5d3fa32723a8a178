"""One trial in Tune's own process: its run in a thread, and how far that has come."""

import os
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.plugin import file_of, loaded_here
from tokendrop.elastic.control import RunControl
from tokendrop.errors import UserError, first_line
from tokendrop.launch.train_loop import fit_in_this_process
from tokendrop.launch.trainer import Fit, fit_on_ray_train, needs_ray_train, run_training
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.study.identity import content_key
from tokendrop.study.record import settings_at
from tokendrop.study.reports import RUN, figures_of, progress_of
from tokendrop.track.journal import MetricsTail

SUMMARY, FAILURE, DETAILS, STOPPED = "summary", "failure", "details", "stopped"
"""What a trial's last report has: what it came to, or why it failed with a traceback, or that somebody stopped it."""
_REPORT_EVERY_S, _STOP_EVERY_S = 1.0, 0.2


class Jobs:
    """The jobs of trials that are chosen as a sweep goes on, in the memory of Ray alone: they may have secrets."""

    def __init__(self) -> None:
        self._held: Any = _Held.remote()

    def __setitem__(self, run: str, job: ExperimentConfig) -> None:
        ray.get(self._held.put.remote(run, job))

    def __getitem__(self, run: str) -> ExperimentConfig:
        return ray.get(self._held.get.remote(run))


@ray.remote(num_cpus=0)
class _Held:
    def __init__(self) -> None:
        self._jobs: dict[str, ExperimentConfig] = {}

    def put(self, run: str, job: ExperimentConfig) -> None:
        self._jobs[run] = job

    def get(self, run: str) -> ExperimentConfig:
        return self._jobs[run]


class TrialRun(tune.Trainable):
    """Trains the run that it is told, and reports how far that is: every second, and at each validation.

    A run that fails is a report of why, not an error: Tune would try it again and again, which helps only those whose
    process is lost. To stop it saves a checkpoint.
    """

    def setup(  # pyright: ignore
        self, config: dict[str, Any], trials: Mapping[str, ExperimentConfig] | Jobs, folder: str = "."
    ) -> None:
        """
        Args:
            folder: where the command runs; relative paths of a job are from there, in this process of its own too.
        """
        if Path(folder).is_dir():  # else this is another machine, with a copy that Ray has made
            os.chdir(folder)
        self._trials = trials
        self._run: str = config[RUN]
        self._ended: Future[dict[str, Any]] | None = None
        self._trains = threading.Event()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Get ready for the next trial in this process, which has imported all it needs."""
        self.cleanup()
        self._run, self._ended = new_config[RUN], None
        return True

    def step(self) -> dict[str, Any]:
        """How far the run is: at its next validation, after a second without one, or at its end."""
        # not before: Tune may set up two processes for a trial, and let one of them go
        ended = self._ended = self._ended or self._begin()
        if not self._lines:
            with suppress(TimeoutError):
                ended.result(timeout=_REPORT_EVERY_S)
            is_over = ended.done()  # asked first: what is journaled until then is read below
            self._lines.extend(self._tail.read(limit=-1))
        else:
            is_over = ended.done()
        found: dict[str, Any] = {}
        while self._lines and "val_loss" not in found:
            found = self._take_in(self._lines.popleft())
        is_over = is_over and not self._lines
        return {**self._report, **found, "done": is_over, **(ended.result() if is_over else {})}

    def _begin(self) -> Future[dict[str, Any]]:
        config = self._trials[self._run]
        self._folder = Path(config.runs_folder) / self._run
        self._task = config.task
        self._tail = MetricsTail(self._folder)
        self._tail.skip()
        self._report: dict[str, Any] = {}
        self._lines: deque[dict[str, Any]] = deque()
        ended: Future[dict[str, Any]] = Future()
        threading.Thread(target=_train, args=(config, ended, self._trains), daemon=True).start()
        return ended

    def _take_in(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """The figures of a validation, which belong to its step alone; nothing for another line."""
        self._report |= progress_of(line)
        return figures_of(line, self._task)

    def cleanup(self) -> None:
        """Let the run save a checkpoint and end; not while another process has it, for whose end this one waits."""
        while self._ended is not None and not self._ended.done():
            if self._trains.is_set():
                RunControl(self._folder).stop()
            with suppress(TimeoutError):
                self._ended.result(timeout=_STOP_EVERY_S)


def _train(config: ExperimentConfig, ended: Future[dict[str, Any]], trains: threading.Event) -> None:
    fit = fit_on_ray_train if needs_ray_train(config) else fit_in_this_process
    try:
        ended.set_result({SUMMARY: run_training(_with_own_files(config), fit=_telling(fit, trains))})
    except KeyboardInterrupt:
        ended.set_result({STOPPED: True})
    except UserError as error:
        ended.set_result({FAILURE: str(error), DETAILS: ""})
    except BaseException as error:  # of a library, of a device: the other trials go on
        told = f"{type(error).__name__}: {first_line(error)}"
        ended.set_result({FAILURE: told, DETAILS: traceback.format_exc()})


def _with_own_files(config: ExperimentConfig) -> ExperimentConfig:
    """A job with classes of this process where it has some from files of the user's, which have come by value.

    Raises:
        UserError: a file is not here, or has changed since the trial was named by its content.
    """
    method, kind = config.drop.method, config.task.kind
    if file_of(method) is None and file_of(kind) is None:
        return config
    named = settings_at(Path(config.runs_folder) / str(config.run))
    drop = loaded_here(config.drop, "drop.method", method, named.get(content_key("drop.method")))
    task = loaded_here(config.task, "task.kind", kind, named.get(content_key("task.kind")))
    return replace(config, drop=drop, task=task)


def _telling(fit: Fit, trains: threading.Event) -> Fit:
    """The same, but it tells when the run is trained here, and a run that was stopped is no run that has ended."""

    def train(spec: WorkerSpec, control: Any) -> None:
        trains.set()
        try:
            fit(spec, control)
        finally:
            trains.clear()
        if control.is_stopped:
            raise KeyboardInterrupt

    return train
