"""Which trials are ended early, because others are better at the same layer tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.study.reports import Reports

_TIME = "layer_tokens"
_FAR = 1000  # times what the base job takes: no trial that a searcher chooses comes to that


@dataclass(frozen=True, kw_only=True)
class _EarlyStopping(ABC):
    """What both kinds have: trials are compared by their validations, at the layer tokens that they have consumed.

    A kept length that still grows makes a run look better or worse than it ends, so nothing is compared before.
    """

    kind: str
    grace: int | None = None
    """Layer tokens before which no trial is ended; those at which all trials see every token, when left out. With a
    searcher, whose trials are not known beforehand, at which the base job does."""

    def __post_init__(self) -> None:
        if self.grace is not None and self.grace < 1:
            raise ValueError(f"grace: want at least 1 layer token, got {self.grace}")

    @abstractmethod
    def made(self, metric: str, mode: str, *, grace: int, end: int, earlier: Reports) -> Any:
        """Ray Tune's scheduler, which compares with what trials have reported in earlier starts, and ends none by that.

        Args:
            end: layer tokens that no trial comes to.
        """


@dataclass(frozen=True, kw_only=True)
class Asha(_EarlyStopping):
    """Asynchronous successive halving (Li et al. 2020): at each rung, the best of those that came so far go on."""

    kind: Literal["asha"] = "asha"
    reduction: float = 3.0
    """One in so many goes on, and the next rung is at so many times the layer tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction <= 1:
            raise ValueError(f"reduction: want more than 1, got {self.reduction:g}")

    def made(self, metric: str, mode: str, *, grace: int, end: int, earlier: Reports) -> Any:
        from tokendrop.study.schedulers import RecallingAsha

        options = {"grace_period": grace, "max_t": end, "reduction_factor": self.reduction}
        return RecallingAsha(earlier, time_attr=_TIME, metric=metric, mode=mode, **options)


@dataclass(frozen=True, kw_only=True)
class Median(_EarlyStopping):
    """Ends a trial whose best is worse than the median of the others' means so far (Golovin et al. 2017)."""

    kind: Literal["median"] = "median"
    least_trials: int = 3
    """Others that must have come as far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_trials < 1:
            raise ValueError(f"least_trials: want at least 1, got {self.least_trials}")

    def made(self, metric: str, mode: str, *, grace: int, end: int, earlier: Reports) -> Any:
        from tokendrop.study.schedulers import RecallingMedian

        options = {"grace_period": grace, "min_samples_required": self.least_trials}
        return RecallingMedian(earlier, time_attr=_TIME, metric=metric, mode=mode, **options)


EarlyStopping = Asha | Median


def scheduler_for(
    stopping: EarlyStopping,
    jobs: Iterable[ExperimentConfig],
    *,
    metric: str,
    mode: str,
    earlier: Reports = lambda run: (),
    are_all: bool = True,
) -> Any:
    """Ray Tune's scheduler for the trials of a sweep.

    Args:
        jobs: of all its trials, those included that earlier starts have ended.
        earlier: what a run has reported in earlier starts.
        are_all: whether there are no other ones; with a searcher there are, and this is the base job.
    Raises:
        UserError: no trial has a validation after the grace and before its end.
    """
    jobs = [*jobs]
    grace = stopping.grace or max(map(_grown, jobs))
    if not any(_is_compared(job, grace) for job in jobs):
        why = "want one by scheduler.grace" if stopping.grace is None else "want a smaller one"
        raise UserError(
            f"scheduler: no trial is validated after a grace of {grace:,} layer tokens and before its end; {why},"
            " drop.schedule.until before the end, or evaluate.every more often"
        )
    end = 1 + max(_total(job) for job in jobs)
    return stopping.made(metric, mode, grace=grace, end=end if are_all else _FAR * end, earlier=earlier)


def _total(job: ExperimentConfig) -> int:
    """Layer tokens of a run, at most."""
    return job.plan.layer_tokens_full if job.drop.adaptive else job.plan.layer_tokens(job.plan.steps)


def _grown(job: ExperimentConfig) -> int:
    """Layer tokens at which the kept lengths of a run change no more, at most."""
    last, plans = 0, [job.plan]
    for key, schedule in job.drop.adaptive.items():
        last = max(last, *schedule.decisions(job.clock))  # at which it may still grow
        bounds = (schedule.always(job.clock, wants=wants).decided for wants in (False, True))
        plans += [job.with_decided({key: decided}).plan for decided in bounds]
    changes = [two.start for one, two in pairwise(job.plan.segments) if one.kept != two.kept]
    return max(1, *(plan.layer_tokens(max([last, *changes])) for plan in plans))


def _is_compared(job: ExperimentConfig, grace: int) -> bool:
    plan, every = job.plan, job.in_steps(job.evaluate.every)
    last = (plan.steps - 1) // every * every  # validation before the end; none in the first steps of a long interval
    return last > 0 and plan.layer_tokens(last) >= grace
