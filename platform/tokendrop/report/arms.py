"""Arms: runs of one job that differ in their seeds alone; what their curves have in common, and how arms compare."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.report.record import RunRecord
from tokendrop.track.parameters import flat

_OF_PLACE = ("seed", "name", "run", "runs_folder", "track", "checkpoint", "evaluate")  # not what is trained
_LONGEST_LABEL = 60


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs of one job, one seed or more."""

    label: str
    runs: list[RunRecord]

    @property
    def config(self) -> ExperimentConfig:
        """The job of its first run."""
        return self.runs[0].config

    @property
    def longest(self) -> RunRecord:
        """The run that came furthest."""
        return max(self.runs, key=lambda run: run.last)

    @property
    def is_complete(self) -> bool:
        """Whether all of its runs are trained to the end."""
        return all(run.is_complete for run in self.runs)

    def last_losses(self) -> dict[int, float]:
        """The last validation loss of each complete run, by seed; those that are not finite are left out."""
        losses = {run.config.seed: float(run.steps["val_loss"][-1]) for run in self.runs if run.is_complete}
        return {seed: loss for seed, loss in losses.items() if np.isfinite(loss)}

    def seconds(self) -> float:
        """Training time, the mean of its runs."""
        return float(np.mean([run.steps["seconds"][-1] for run in self.runs]))


def arms_of(runs: Iterable[RunRecord]) -> list[Arm]:
    """Runs by what they train, in the order in which they come."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_trained(run), sort_keys=True, default=str), []).append(run)
    return [Arm(label, group) for label, group in zip(_labels([*groups.values()]), groups.values(), strict=True)]


def _trained(run: RunRecord) -> dict[str, Any]:
    tree = {key: value for key, value in asdict(run.config.undecided).items() if key not in _OF_PLACE}
    tree["data"].pop("folder")
    if run.lineage is not None:  # what its job says counts from there on
        tree |= {"forked_from": run.lineage.name, "forked_at": run.lineage.step}
    return tree


def _labels(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """Names of jobs; where arms have the same, with the keys that tell them apart, and at last a number.

    Where those are too many, one key that tells all of them apart does.
    """
    labels: list[str] = []
    names, keys = [_name(group[0].config) for group in groups], [_keys(group[0]) for group in groups]
    for name, own in zip(names, keys, strict=True):
        alike = [one for other, one in zip(names, keys, strict=True) if other == name]
        differ = [key for key in dict.fromkeys(key for one in alike for key in one) if _values(key, alike) > 1]
        if any(len(_label(name, one, differ)) > _LONGEST_LABEL for one in alike):
            differ = [key for key in differ if _values(key, alike) == len(alike)][:1] or differ
        said = _label(name, own, differ)
        said = said if len(said) <= _LONGEST_LABEL else f"{said[: _LONGEST_LABEL - 3]}..."
        again = labels.count(said)
        labels.append(said if not again else f"{said} ({sum(one.startswith(said) for one in labels) + 1})")
    return labels


def _values(key: str, alike: Sequence[Mapping[str, str]]) -> int:
    """How many values a key has in some jobs; where it is missing is one."""
    return len({one.get(key) for one in alike})


def _label(name: str, keys: Mapping[str, str], differ: Iterable[str]) -> str:
    return " ".join([name, *(f"{key.rpartition('.')[2]}={keys[key]}" for key in differ if key in keys)])


def _name(config: ExperimentConfig) -> str:
    """Of a job; of a trial, that of its sweep, for its own is a hash."""
    return config.track.sweep or config.name


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _keys(run: RunRecord) -> dict[str, str]:
    return flat(_trained(run), text=_short)


def reference(arms: Sequence[Arm]) -> Arm:
    """The arm that others are compared with: the first that drops nothing, or else the first."""
    return next((arm for arm in arms if arm.config.plan.layer_token_saving() == 0), arms[0])


@dataclass(frozen=True, slots=True)
class Difference:
    """Of the mean last validation losses of two arms; the interval needs two seeds or more of both."""

    mean: float
    low: float | None = None
    high: float | None = None
    how: str = "one seed, no interval"


def difference(arm: Arm, other: Arm) -> Difference | None:
    """How much higher an arm's loss is, with its 95% interval by Student's t; None where one has no loss."""
    ours, theirs = arm.last_losses(), other.last_losses()
    if not ours or not theirs:
        return None
    mean = float(np.mean([*ours.values()]) - np.mean([*theirs.values()]))
    if min(len(ours), len(theirs)) < 2:
        return Difference(mean)
    if ours.keys() == theirs.keys():
        result = stats.ttest_rel([ours[seed] for seed in ours], [theirs[seed] for seed in ours])
        how = f"{len(ours)} seeds, paired"
    else:
        result = stats.ttest_ind([*ours.values()], [*theirs.values()], equal_var=False)
        how = f"{len(ours)} and {len(theirs)} seeds, Welch"
    interval: Any = result.confidence_interval(0.95)
    if not np.isfinite([interval.low, interval.high]).all():  # losses without any spread
        return Difference(mean, mean, mean, how)
    return Difference(mean, float(interval.low), float(interval.high), how)
