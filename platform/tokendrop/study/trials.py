"""The trials of a sweep: known in full before the first one starts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import Tree, shown
from tokendrop.config.load import load_job, read_job
from tokendrop.config.overrides import with_override
from tokendrop.errors import UserError
from tokendrop.schedule.plan import RunPlan
from tokendrop.study.axes import Axis
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
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.config.runs_folder).absolute() / self.run

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
    _check_count(sweep, path, many=many)
    for override in overrides:
        if (key := override.partition("=")[0]) in (*sweep.axes, "seed", "name", "run"):
            raise UserError(f"override {shown(repr(override))}: the sweep itself gives '{key}'; want another key")
    base = path.parent / sweep.base
    common = [*(_override(key, value) for key, value in sweep.set.items()), *overrides]
    job = load_job(base, common)
    seeds = sweep.seeds if isinstance(sweep.seeds, tuple) else range(job.seed, job.seed + sweep.seeds)
    tree = read_job(base)
    for override in common:
        tree = with_override(tree, override)
    points = [point for sample in range(sweep.samples) for point in _points(sweep, tree, sample)]
    trials = [_trial(base, common, point, seed, path) for seed in seeds for point in points]
    return _different(trials, path, drawn=sweep.draws)


def _check_count(sweep: SweepConfig, path: Path, *, many: bool) -> None:
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


def _trial(base: Path, common: Sequence[str], point: Point, seed: int, path: Path) -> Trial:
    overrides = [*common, *(_override(key, value) for key, value in point), _override("seed", seed)]
    try:
        config = load_job(base, overrides)
    except UserError as error:
        raise UserError(f"{shown(path)}: trial ({shown(point_text(point))}): {error}") from None
    settings = settings_of(config)
    name = run_name(settings)
    return Trial(config=replace(config, name=name, run=name), settings=settings, point=point)


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
