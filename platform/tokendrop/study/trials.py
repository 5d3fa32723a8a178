"""The trials of a sweep: known in full before the first one starts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import Tree, shown
from tokendrop.config.load import load_job, read_job
from tokendrop.config.overrides import with_override
from tokendrop.config.run import SWEEP
from tokendrop.errors import UserError
from tokendrop.schedule.duration import Duration
from tokendrop.schedule.plan import RunPlan
from tokendrop.study.axes import Axis
from tokendrop.study.budget import BUDGET, Measure, cost_of, within
from tokendrop.study.identity import run_name, settings_of
from tokendrop.study.sweep import SweepConfig

MOST_UNASKED, _MOST = 1000, 100_000

Point = tuple[tuple[str, object], ...]
"""A value for each axis that is there, in order."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    config: ExperimentConfig
    """Its job, which names its run folder."""
    settings: Mapping[str, str]
    """What its name is a hash of."""
    point: Point

    @property
    def run(self) -> str:
        """The name of its run folder."""
        assert self.config.run is not None
        return self.config.run

    @property
    def text(self) -> str:
        """What it is among the trials of its sweep."""
        return ", ".join([point_text(self.point), f"seed {self.config.seed}"]).removeprefix(", ")

    @cached_property
    def plan(self) -> RunPlan | None:
        """None where its corpus has to be prepared first."""
        return None if self.config.waits_for_epochs else self.config.plan


def point_text(point: Point) -> str:
    """Values as people read them, without the branches of their keys."""
    return ", ".join(f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in point)


def value_text(value: object) -> str:
    """A value of an axis as people read it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        named = value.get("method", value.get("kind", value.get("preset")))
        return str(named) if named is not None else json.dumps(value, default=str)
    return str(value)


def expand(sweep: SweepConfig, path: Path, overrides: Sequence[str] = (), *, many: bool = False) -> list[Trial]:
    """All trials of a sweep, seed by seed.

    Args:
        path: of the sweep file.
        overrides: of the base job, `key=value`; they win over the sweep's `set`.
        many: whether there may be more than a thousand.
    Raises:
        UserError: there are too many, none, or one of their jobs is wrong.
    """
    check_count(sweep, path, many=many)
    made = TrialMaker(sweep, path, overrides)
    points = [point for sample in range(sweep.samples) for point in _points(sweep, made.tree, sample)]
    _check_used(sweep, points, path)
    arms = [arm for point in points for arm in made.arms(point)]
    trials = _different([trial for seed in zip(*arms, strict=True) for trial in seed], path, drawn=sweep.draws)
    if sweep.claim is not None:
        arm, against = (trials_with(trials, getattr(sweep.claim, name), name) for name in ("arm", "against"))
        if arm == against:
            raise UserError(f"{shown(path)}: claim: arm and against are the same arm; want two")
    return trials


def trials_with(trials: Sequence[Trial], keys: Mapping[str, object], name: str) -> list[Trial]:
    """The trials of the one arm whose jobs have these values, seed by seed.

    Args:
        name: of the key of the claim, for what is said.
    Raises:
        UserError: there is none, or there are several.
    """
    found = [trial for trial in trials if all(_is(trial.settings.get(key), value) for key, value in keys.items())]
    arms = len({repr(trial.point) for trial in found})
    if arms != 1:
        said = ", ".join(f"{key}: {value}" for key, value in keys.items())
        raise UserError(f"claim.{name}: {arms} arms of the sweep have {said}; want keys that one arm has")
    return found


def _is(setting: str | None, value: object) -> bool:
    """Whether a setting of a trial is a value of a sweep file, which may write it in another way: 0 for 0.0."""
    text = str(tuple(value) if isinstance(value, list) else value)
    return setting is not None and _meaning(setting) == _meaning(text)


def _meaning(text: str) -> object:
    """A number or a duration, where a text is one."""
    for read in (float, Duration.parse):
        with suppress(ValueError):
            return read(text)
    return text


class TrialMaker:
    """Makes the trials of a sweep from points of its axes."""

    def __init__(self, sweep: SweepConfig, path: Path, overrides: Sequence[str] = ()) -> None:
        """As `expand`, errors too."""
        for override in overrides:
            if (key := override.partition("=")[0]) in (*sweep.axes, *sweep.given):
                raise UserError(f"override {shown(repr(override))}: the sweep itself gives '{key}'; want another key")
        self.sweep, self.path, self.base = sweep, path, path.parent / sweep.base
        self._common = [*(_override(key, value) for key, value in sweep.set.items()), *overrides]
        self.tree = read_job(self.base)
        for override in self._common:
            self.tree = with_override(self.tree, override)
        job = load_job(self.base, self._common)
        self._seeds = sweep.seeds if isinstance(sweep.seeds, tuple) else range(job.seed, job.seed + sweep.seeds)
        self._amounts = () if sweep.budget is None else sweep.budget.amounts or (cost_of(job, sweep.budget.equal),)

    def point(self, values: Mapping[str, object]) -> Point:
        """The point of so many values; those of axes that are not there with the others are left out."""
        point, tree = (), self.tree
        for key, axis in self.sweep.axes.items():
            if _is_there(axis, tree):
                point, tree = (*point, (key, values[key])), with_override(tree, _override(key, values[key]))
        return point

    def base_trial(self) -> Trial:
        """The job that all trials begin with, as a trial with the first seed."""
        return self.arms(())[0][0]

    def arms(self, point: Point) -> list[list[Trial]]:
        """For each budget, one without any, the trials of all seeds."""
        if self.sweep.budget is None:
            return [[self._trial(point, seed, None) for seed in self._seeds]]
        return [self._arm(point, amount, self.sweep.budget.equal) for amount in self._amounts]

    def _arm(self, point: Point, amount: float, measure: Measure) -> list[Trial]:
        with _naming(self.path, point):
            length = within(self._job(point, self._seeds[0]), measure, amount).train.length
        point = (*point, (BUDGET, amount)) if len(self._amounts) > 1 else point
        return [self._trial(point, seed, length) for seed in self._seeds]

    def _trial(self, point: Point, seed: int, length: Duration | None) -> Trial:
        with _naming(self.path, point):
            config = self._job(point, seed)
            config = config if length is None else replace(config, train=replace(config.train, length=length))
        settings = settings_of(config)
        name = run_name(settings)
        track = replace(config.track, tags={**config.track.tags, SWEEP: self.sweep.name})
        return Trial(config=replace(config, name=name, run=name, track=track), settings=settings, point=point)

    def _job(self, point: Point, seed: int) -> ExperimentConfig:
        own = [_override(key, value) for key, value in point if key != BUDGET]
        return load_job(self.base, [*self._common, *own, _override("seed", seed)])


@contextmanager
def _naming(path: Path, point: Point) -> Iterator[None]:
    """Errors from the block name the sweep and the trial."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{shown(path)}: trial ({shown(point_text(point))}): {error}") from None


def check_count(sweep: SweepConfig, path: Path, *, many: bool) -> None:
    """Raises UserError where a sweep has more trials than a slip should start."""
    count = sweep.most_trials
    if count > _MOST:
        raise UserError(f"{path}: {count:,} trials, want at most {_MOST:,}")
    if count > MOST_UNASKED and not many:
        raise UserError(f"{path}: {count:,} trials; want fewer, or --yes to plan more than {MOST_UNASKED:,}")


def _points(sweep: SweepConfig, tree: Tree, sample: int) -> list[Point]:
    """The cells of the grid, with the drawn values of one sample."""
    found: list[tuple[Point, Tree]] = [((), tree)]
    for key, axis in sweep.axes.items():
        values = axis.values_for(Random(f"{sweep.draw_seed} {sample} {key}"))
        found = [
            ((*point, (key, value)), with_override(so_far, _override(key, value))) if is_there else (point, so_far)
            for point, so_far in found
            for is_there in [_is_there(axis, so_far)]
            for value in (values if is_there else [None])
        ]
    return [point for point, _ in found]


def _check_used(sweep: SweepConfig, points: Sequence[Point], path: Path) -> None:
    """Raises UserError for an axis that no point has; where points are drawn, that may be by chance."""
    used = {key for point in points for key, _ in point}
    for key in sweep.axes:
        if key not in used and not sweep.draws:
            said = "no trial has it; want a 'when' that the base job or an axis before it has in its file"
            raise UserError(f"{shown(path)}: axes.{key}: {said}")


def _is_there(axis: Axis, tree: Tree) -> bool:
    """Whether a job has all values that an axis asks for."""
    return all(
        _at(tree, key) in (wanted if isinstance(wanted, list) else [wanted]) for key, wanted in axis.when.items()
    )


def _at(tree: Tree, key: str) -> object:
    """What a job's files have at a dotted key; None where they have nothing."""
    below: object = tree
    for part in key.split("."):
        below = below.get(part) if isinstance(below, dict) else None
    return below


def _override(key: str, value: object) -> str:
    return f"{key}={json.dumps(value, default=str)}"


def _different(trials: Sequence[Trial], path: Path, *, drawn: bool) -> list[Trial]:
    """The trials, each once; what was drawn may come twice.

    Raises:
        UserError: two cells of a grid are the same run.
    """
    first: dict[str, Trial] = {}
    for trial in trials:
        known = first.setdefault(trial.run, trial)
        if known is not trial and not drawn:
            raise UserError(
                f"{shown(path)}: axes: two trials are the same run: ({known.text}) and ({trial.text}); want each once"
            )
    return [*first.values()]
