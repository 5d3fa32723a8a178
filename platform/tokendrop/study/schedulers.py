"""Ray Tune's schedulers, which know what trials have reported in earlier starts of a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler

from tokendrop.study.reports import RUN, Reports


@dataclass(frozen=True)
class EndedTrial:
    """In the place of Ray Tune's trial, for one that an earlier start has ended: Tune is not told of it."""

    trial_id: str

    @property
    def config(self) -> dict[str, Any]:
        """What Tune would give its trial."""
        return {RUN: self.trial_id}


class _Past:
    """What trials have reported in earlier starts, each told once: Tune adds a trial again whose process was lost."""

    def __init__(self, earlier: Reports) -> None:
        self._earlier = earlier
        self._told: set[str] = set()

    def of(self, trial: Any) -> list[dict[str, Any]]:
        """The reports of a trial that is added for the first time."""
        run = trial.config[RUN]
        if run in self._told:
            return []
        self._told.add(run)
        return [dict(report) for report in self._earlier(run)]


class RecallingAsha(ASHAScheduler):
    """Puts a trial on the rungs that it has passed in earlier starts, before it goes on."""

    def __init__(self, earlier: Reports, **options: Any) -> None:
        super().__init__(**options)
        self._past = _Past(earlier)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Take in a trial, with its past."""
        super().on_trial_add(tune_controller, trial)
        for report in self._past.of(trial):
            super().on_trial_result(tune_controller, trial, report)  # it was decided upon then


class RecallingMedian(MedianStoppingRule):
    """Knows each validation of a trial once, those of earlier starts too, and pauses none: trials can't be paused."""

    def __init__(self, earlier: Reports, *, metric: str, time_attr: str, **options: Any) -> None:
        never: Any = inf  # seconds that a trial has had, before another one takes its place
        super().__init__(metric=metric, time_attr=time_attr, min_time_slice=never, **options)
        self._past, self._of_validation, self._at = _Past(earlier), metric, time_attr
        self._last: dict[str, int] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Take in a trial, with its past."""
        super().on_trial_add(tune_controller, trial)
        for report in self._past.of(trial):
            self.on_trial_complete(tune_controller, trial, report)  # which takes it in and decides nothing

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Decide by a validation; by one that a lost process has reported before, to go on."""
        if not self._is_news(trial, result):
            return TrialScheduler.CONTINUE
        return super().on_trial_result(tune_controller, trial, result)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Take in the last report, where it is a validation that was not told yet."""
        if self._is_news(trial, result):
            super().on_trial_complete(tune_controller, trial, result)

    def _is_news(self, trial: Any, result: Mapping[str, Any]) -> bool:
        at = result.get(self._at)
        if self._of_validation not in result or at is None or at <= self._last.get(trial.trial_id, -1):
            return False
        self._last[trial.trial_id] = at
        return True
