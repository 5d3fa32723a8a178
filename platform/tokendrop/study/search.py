"""Points of the axes that a searcher chooses, each by what the ones before came to over their seeds."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ray.tune.search import Searcher

from tokendrop.errors import UserError
from tokendrop.output import log
from tokendrop.study.arms import AGGREGATES
from tokendrop.study.axes import Axis, Choice, Grid, LogUniform
from tokendrop.study.reports import RUN
from tokendrop.study.sweep import SweepConfig
from tokendrop.study.trainable import FAILURE, STOPPED, SUMMARY
from tokendrop.study.trials import Point, Trial, TrialMaker

Choices = dict[str, Any]
"""A value for each axis, whether or not it is there with the others."""
_REPEATS = 100  # of what was chosen before, until nothing new is expected


@dataclass(kw_only=True)
class _Arm:
    """The trials of one point, of which some may still train."""

    chosen: Any
    """Optuna's trial."""
    left: int
    """Trials of which nothing is known yet."""
    values: list[float] = field(default_factory=list)
    """The metric of the others; NaN where one has failed."""


class ArmSearch(Searcher):
    """Optuna's choice of arms (TPE), for Ray Tune, which asks for one trial after the other.

    An arm's trials are its seeds. Optuna is told of it once: the mean or median over them, or that one has failed.
    Tune's own searcher for Optuna knows trials alone.
    """

    def __init__(
        self,
        sweep: SweepConfig,
        maker: TrialMaker,
        *,
        begin: Callable[[Trial], float | None],
        remember: Callable[[Sequence[Choices]], None],
        remembered: Sequence[Choices] = (),
    ) -> None:
        """
        Args:
            begin: told of each trial before it is trained; its metric where it need not be, NaN where it has failed.
            remember: told of all that was chosen, in earlier starts too.
            remembered: what was chosen in earlier starts. It counts as far as the axes still have it.
        """
        super().__init__(metric=sweep.metric, mode=sweep.mode)
        import optuna

        assert sweep.searcher is not None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        remembered = [one for one in remembered if _has(sweep.axes, one)]
        seed = sweep.draw_seed + len(remembered)  # not to draw again what it drew before
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=sweep.searcher.startup)
        self._study = optuna.create_study(
            sampler=sampler, direction="minimize" if sweep.lower_is_better else "maximize"
        )
        for choices in remembered:
            self._study.enqueue_trial({key: _for_optuna(axis, choices[key]) for key, axis in sweep.axes.items()})
        self._space = {key: _distribution(axis) for key, axis in sweep.axes.items()}
        self._sweep, self._maker, self._begin, self._remember = sweep, maker, begin, remember
        self._chosen, self._remembered = list[Choices](), [*remembered]
        self._most = max(sweep.searcher.arms, len(remembered))
        self._waiting: deque[tuple[Trial, _Arm]] = deque()
        self._training: dict[str, _Arm] = {}  # by Tune's id of a trial
        self._met: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """The next trial to train; FINISHED where there is none."""
        repeats = 0
        while not self._waiting and len(self._chosen) < self._most and repeats < _REPEATS:
            repeats = 0 if self._choose() else repeats + 1
        if not self._waiting:
            return Searcher.FINISHED
        trial, arm = self._waiting.popleft()
        self._training[trial_id] = arm
        return {RUN: trial.run}

    def _choose(self) -> bool:
        """Let Optuna choose an arm, and note what is known of it; False where it is one from before."""
        chosen = self._study.ask(self._space)
        values = {key: _of_optuna(self._sweep.axes[key], one) for key, one in chosen.params.items()}
        trials = self._new_trials(self._maker.point(values))
        if not trials:
            self._study.tell(chosen, state=_state("FAIL"))
            return False
        self._chosen.append(values)
        self._remember([*self._chosen, *self._remembered[len(self._chosen) :]])
        arm = _Arm(chosen=chosen, left=len(trials))
        for trial in trials:
            known = self._begin(trial)
            if known is None:
                self._waiting.append((trial, arm))
            else:
                self._take_in(arm, known)
        return True

    def _new_trials(self, point: Point) -> list[Trial]:
        """The trials of a point; none where it is one from before, or no job can be so."""
        try:
            trials = [trial for arm in self._maker.arms(point) for trial in arm]
        except UserError as error:  # of values that don't go together
            if repr(point) not in self._met:
                log(f"failed   {error}")
            self._met.add(repr(point))
            return []
        is_new = trials[0].run not in self._met
        self._met.add(trials[0].run)
        return trials if is_new else []

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take in a trial that Tune has ended: well, with a failure, or early, by what it had come to."""
        arm, metric = self._training.pop(trial_id, None), self._sweep.metric
        if arm is None:
            return
        result = {FAILURE: ""} if error or result is None else result  # flat: Tune joins keys by a slash
        found = None if {FAILURE, STOPPED} & result.keys() else result.get(f"{SUMMARY}/{metric}", result.get(metric))
        self._take_in(arm, float("nan") if found is None else float(found))

    def _take_in(self, arm: _Arm, value: float) -> None:
        arm.left -= 1
        arm.values.append(value)
        if arm.left:
            return
        if all(map(isfinite, arm.values)):
            self._study.tell(arm.chosen, AGGREGATES[self._sweep.aggregate](arm.values))
        else:
            self._study.tell(arm.chosen, state=_state("FAIL"))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: `remember` is told."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: a new one begins with what is remembered."""


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]


def _has(axes: Mapping[str, Axis], choices: Choices) -> bool:
    """Whether the axes still are those of an earlier choice, and have its values."""
    return axes.keys() == choices.keys() and all(
        choices[key] in axis.values if isinstance(axis, Grid | Choice) else axis.low <= choices[key] <= axis.high
        for key, axis in axes.items()
    )


def _for_optuna(axis: Axis, value: Any) -> Any:
    """A value as Optuna has it: a number, or of a list of values the place in it."""
    return axis.values.index(value) if isinstance(axis, Grid | Choice) else value


def _of_optuna(axis: Axis, chosen: Any) -> Any:
    return axis.values[chosen] if isinstance(axis, Grid | Choice) else axis.rounded(chosen)


def _distribution(axis: Axis) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(axis, Grid | Choice):
        return CategoricalDistribution(range(len(axis.values)))
    return FloatDistribution(axis.low, axis.high, log=isinstance(axis, LogUniform))
