"""Evaluation of a run's checkpoints as they are committed, which training neither waits for nor fails by."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayTaskError

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import EvaluateConfig
from tokendrop.errors import first_line
from tokendrop.launch.stopping import go_on
from tokendrop.output import log
from tokendrop.track.evaluations import evaluated_steps
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, remove_old, step_of

Evaluate = Callable[[Path, EvaluateConfig], str]
"""Evaluates a checkpoint in another process and says what it came to."""

_POLL_S = 1.0


class CheckpointEvaluation:
    """While its block runs, a thread has checkpoints evaluated, one at a time; it ends with that of the last one.

    Each is evaluated by a Ray task. Those committed during an evaluation are passed over, all but the newest: to keep
    them all for a slow evaluation would fill the disk. Where the block fails, nothing is waited for.
    """

    def __init__(self, run: Path, config: ExperimentConfig, evaluate: Evaluate | None) -> None:
        """
        Args:
            evaluate: None where the job asks for nothing.
        """
        self.run, self.config, self.evaluate = run, config, evaluate
        self._every = config.in_steps(config.evaluate.tasks_every) if config.evaluate.tasks_every else 1
        self._seen = max(evaluated_steps(run), default=0) if evaluate else 0
        self._training_ended, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "CheckpointEvaluation":
        if self.evaluate is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is not None:
            self._given_up.set()
        self._training_ended.set()
        if kind is None and self.evaluate is not None:
            if self._thread.is_alive():
                log("evaluate training has ended; waiting for the tasks of its last checkpoint")
            try:
                self._thread.join()
            except KeyboardInterrupt:  # training is over, and well
                go_on()
                self._given_up.set()
                log("evaluate left out; `tokendrop evaluate` catches up on it")

    def _follow(self) -> None:
        is_last = False
        while not (is_last or self._given_up.is_set()):
            is_last = self._training_ended.wait(_POLL_S)
            checkpoint = self.due()
            if checkpoint is None:
                continue
            self._seen = step_of(checkpoint)
            try:
                told = self._result_of(checkpoint)
                if told is not None:
                    log(f"evaluate step {self._seen}: {told}")
            except Exception as failure:  # whatever a task, its data or Ray raise: training goes on
                cause = failure.cause if isinstance(failure, RayTaskError) else failure
                log(f"evaluate step {self._seen}: left out ({first_line(cause)})")
            with suppress(OSError):
                remove_old(self.run / CHECKPOINTS, self.config.checkpoint.keep)

    def due(self) -> Path | None:
        """The newest checkpoint, where it is `tasks_every` after the one before, or the run's last."""
        saved = committed(self.run / CHECKPOINTS)
        step = step_of(saved[-1]) if saved else 0
        is_due = step >= self._seen + self._every or self._seen < step == self.config.plan.steps
        return saved[-1] if is_due else None

    def _result_of(self, checkpoint: Path) -> str | None:
        """What the evaluation of a checkpoint came to; None where nobody waits for it any more."""
        evaluate, wanted = self.evaluate, self.config.evaluate

        def do() -> str:  # Ray wants a function
            assert evaluate is not None
            return evaluate(checkpoint, wanted)

        # the process has a priority of its own, so no other task may follow in it
        options = {"num_cpus": wanted.task_cpus, "num_gpus": wanted.task_gpus, "max_retries": 0, "max_calls": 1}
        remote: Any = ray.remote(**options)(do)
        result = remote.remote()
        while not self._given_up.is_set():
            ready, _ = ray.wait([result], timeout=_POLL_S)
            if ready:
                return ray.get(result)
        ray.cancel(result, force=True)
        return None
