"""How far a sweep has come: told by Tune, shown to people, and the word that ends it early."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from ray import tune

from tokendrop.errors import UserError, first_line
from tokendrop.output import StatusLine, is_terminal, log
from tokendrop.study.arms import arms_of, best_of
from tokendrop.study.live import arms_table
from tokendrop.study.record import SweepRecord
from tokendrop.study.reports import RUN
from tokendrop.study.sweep import SweepConfig
from tokendrop.study.trainable import DETAILS, FAILURE, STOPPED, SUMMARY
from tokendrop.study.trials import Trial
from tokendrop.study.usage import usage_of, usage_text
from tokendrop.track.journal import read_events, recorded_span
from tokendrop.track.prometheus import exporting, tags_of
from tokendrop.track.run_metrics import Series

_LINE_EVERY_S = 60.0  # where nobody looks at a terminal


class Progress(tune.Callback):
    """Follows the trials; on a terminal with a table of their arms, else with a line a minute."""

    def __init__(self, sweep: SweepConfig, trials: Sequence[Trial], record: SweepRecord) -> None:
        self.sweep, self.record = sweep, record
        self.trials = {trial.run: trial for trial in trials}
        self.summaries: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.stopped: dict[str, dict[str, Any]] = {}
        """What trials had come to that the scheduler ended early."""
        self.stopper = _Stopper()
        self._fault: str | None = None
        self._begun_here: set[str] = set()
        self._running: dict[str, dict[str, Any]] = {}
        """What trials that run have last reported."""
        self._total: StatusLine | None = None
        self._begun = self._told = time.monotonic()
        self._at_begin, self._since = 0, time.time()
        self._export = ExitStack()
        self._best_of: tuple[int, float | None] = 0, None

    def __enter__(self) -> "Progress":
        self._export.enter_context(exporting(self.values, tags_of(None, self.sweep.name)))
        self._begun, self._since = time.monotonic(), time.time()
        self._told, self._at_begin = self._begun, self._done
        self._total = StatusLine() if is_terminal() else None
        self._show()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Nothing, for Tune's file of an experiment, which nobody reads: jobs may have secrets."""
        return {}

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if self._total:
            self._show(always=True)
            self._total.end()
        self._export.close()
        trained = [Path(self.summaries[run]["run"]) for run in self._begun_here if run in self.summaries]
        if usage := usage_of([span for run in trained if (span := self._span(run))]):
            log(f"sweep    {usage_text(usage)}")

    def _span(self, run: Path) -> tuple[float, float] | None:
        """When a trial began in this start of the sweep, and when it ended; None where its record does not say."""
        attempts = [line.get("time", 0.0) for line in read_events(run) if "attempt_from" in line]
        begins, whole = [begin for begin in attempts if begin >= self._since], recorded_span(run)
        return (begins[0], whole[1]) if begins and whole else None

    def finish(self, run: str, summary: dict[str, Any]) -> None:
        """Take in a trial that ended well."""
        self.summaries[run] = summary
        self._check_metric(summary)

    def fail(self, run: str, reason: str, details: str) -> None:
        """Take in a trial that failed just now, and remember it for the next start."""
        self.record.note_failure(run, reason, details)
        self.note(run, reason)

    def note(self, run: str, reason: str) -> None:
        """Take in a trial that is known to have failed."""
        self.failures[run] = reason
        log(f"failed   {run} ({self.trials[run].text}): {reason}")

    def note_stopped(self, run: str, report: dict[str, Any]) -> None:
        """Take in a trial that is known to have been ended early."""
        self.stopped[run] = report

    def value(self, run: str) -> float | None:
        """The metric of a trial that has ended; NaN where it has failed or has none, None where it has not ended."""
        found = self.summaries.get(run, self.stopped.get(run))
        if found is None:
            return float("nan") if run in self.failures else None
        value = found.get(self.sweep.metric)
        return float("nan") if value is None else float(value)

    def is_open(self, run: str) -> bool:
        """Whether a trial has neither come to its end, nor failed, nor been ended early."""
        return not any(run in ended for ended in (self.summaries, self.failures, self.stopped))

    @property
    def _done(self) -> int:
        return len(self.summaries) + len(self.failures) + len(self.stopped)

    @property
    def _all(self) -> int:
        """Trials of the sweep, those that are not chosen yet included."""
        return max(len(self.trials), self.sweep.most_trials if self.sweep.searcher else 0)

    def _states(self) -> dict[str, int]:
        """How many trials are in which state."""
        running = sum(map(self.is_open, [*self._running]))  # Tune may begin the next one before it lets go of one
        ended = {"finished": self.summaries, "failed": self.failures, "stopped early": self.stopped}
        some = {name: len(trials) for name, trials in ended.items()}
        return some | {"running": running, "to train": self._all - self._done - running}

    def counts(self) -> str:
        """How many trials are in which state, as people read it."""
        counted = [f"{count} {name}" for name, count in self._states().items() if count]
        return f"{self._all} trials: {', '.join(counted)}"

    def values(self) -> dict[Series, float]:
        """What Prometheus is told: trials by state, and the metric of the best arm so far."""
        found: dict[Series, float] = {
            ("sweep/trials", (("state", name),)): count for name, count in self._states().items()
        }
        if (best := self._best()) is not None:
            found["sweep/best", (("metric", self.sweep.metric),)] = best
        return found

    def _best(self) -> float | None:
        summaries = {**self.summaries}
        if self._best_of[0] != len(summaries):
            best = best_of(self.sweep, arms_of(self.sweep, [*self.trials.values()], summaries))
            self._best_of = len(summaries), best and best.value
        return self._best_of[1]

    def stop(self) -> None:
        """End the sweep; trials that run save a checkpoint."""
        self.stopper.is_set = True

    def raise_fault(self) -> None:
        """Raises UserError where the sweep ended early because no trial gives its metric."""
        if self._fault:
            raise UserError(self._fault)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._begun_here.add(trial.config[RUN])
        self._running[trial.config[RUN]] = {}
        self._show()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        run = trial.config[RUN]
        self._running[run] = self._running.get(run, {}) | result
        if SUMMARY in result:
            self.finish(run, result[SUMMARY])
        elif FAILURE in result:
            self.fail(run, result[FAILURE], result[DETAILS])
        self._check_metric(result)
        self._show()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        run, report = trial.config[RUN], self._running.pop(trial.config[RUN], {})
        if self.is_open(run) and not self.stopper.is_set:
            self._end_early(run, report)
        self._show()

    def _end_early(self, run: str, report: dict[str, Any]) -> None:
        """Take in a trial that the scheduler has just ended, or whose run was stopped by somebody else."""
        if STOPPED in report:
            log(f"stopped  {run}, from elsewhere; the same command goes on with it")
        elif "step" in report:
            known = ("step", "layer_tokens", "loss")
            self.note_stopped(run, {key: report[key] for key in report if key in known or key.startswith("val_")})
            self.record.note_stopped(run, self.stopped[run])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Its process was lost, more often than it may be."""
        run, error = trial.config[RUN], trial.get_error()
        self.fail(run, f"its process was lost ({first_line(error) if error else 'unknown'})", str(error))
        self._running.pop(run, None)
        self._show()

    def _check_metric(self, result: dict[str, Any]) -> None:
        """The first validation tells which figures all trials have; a metric that is none of them ends the sweep."""
        metric, figures = self.sweep.metric, [key for key in result if key.startswith("val_")]
        if figures and metric.startswith("val_") and metric not in figures and self._fault is None:
            self._fault = f"metric: no trial reports {metric}; want one of {', '.join(figures)}"
            self.stop()

    def _show(self, *, always: bool = False) -> None:
        now = time.monotonic()
        if self._total is not None:
            self._total.show(self._text, panel=lambda: f"{self._table()}\n{self._text()}", always=always)
        elif now - self._told >= _LINE_EVERY_S:
            self._told = now
            log(self._text())

    def _table(self) -> str:
        trials = [*self.trials.values()]
        arms = arms_of(self.sweep, trials, self.summaries)
        running = {run: report for run, report in self._running.items() if self.is_open(run)}
        lower = self.sweep.lower_is_better
        return arms_table(arms, self.sweep.metric, running, lower=lower, failed=[*self.failures])

    def _text(self) -> str:
        done, took_s = self._done - self._at_begin, time.monotonic() - self._begun
        left = self._all - self._done
        if not done or not left:
            return f"sweep    {self.counts()}"
        minutes, seconds = divmod(round(took_s / done * left), 60)
        return f"sweep    {self.counts()}  ETA {minutes}:{seconds:02}"


class _Stopper(tune.Stopper):
    """Ends all trials of an experiment at once."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.is_set
