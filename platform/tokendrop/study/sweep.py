"""A sweep file: a base job, what is varied, and by what trials are judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal

from tokendrop.config.files import read_mapping, shown
from tokendrop.config.load import build
from tokendrop.errors import UserError
from tokendrop.study.axes import Axis, Grid
from tokendrop.study.budget import Budget
from tokendrop.study.claim import Claim
from tokendrop.study.early_stopping import EarlyStopping
from tokendrop.study.identity import says_only_where

_MOST_SEEDS, _MOST_SAMPLES = 1000, 100_000
_OF_VALIDATION = "val_"
_LENGTH = "train.length"
_COSTS = ("layer_tokens", "flops", "wall_clock_s")
_LOWER_IS_BETTER = ("val_loss", "val_perplexity", *_COSTS)


@dataclass(frozen=True, kw_only=True)
class OptunaSearch:
    """Arms are chosen by Optuna (TPE), each by the metric of those before, within the axes; a grid is a choice."""

    kind: Literal["optuna"] = "optuna"
    arms: int
    """How many; fewer where the axes have no more."""
    startup: int = 10
    """Arms that are drawn before the first one is chosen."""

    def __post_init__(self) -> None:
        if not 1 <= self.arms <= _MOST_SAMPLES:
            raise ValueError(f"arms: want 1 to {_MOST_SAMPLES:,}, got {self.arms:,}")
        if self.startup < 1:
            raise ValueError(f"startup: want at least 1, got {self.startup}")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """One sweep, whole."""

    base: str
    """The job file that all trials begin with, from the folder of the sweep file on."""
    name: str
    """Of the sweep's folder, in `sweeps` below the job's `runs_folder`."""
    set: Mapping[str, object] = field(default_factory=dict)
    """Values of the job's keys, dotted, that are the same in all trials."""
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """What varies, by dotted key."""
    samples: int = 1
    """How often drawn axes are drawn; with grids beside them, for every cell of these the same draws."""
    draw_seed: int = 0
    """Of the draws."""
    seeds: int | tuple[int, ...] = 1
    """Of the runs: a list of them, or so many from the job's own on."""
    metric: str = "val_loss"
    """What trials are judged by: what `tokendrop train --json` gives of their validation, such as val_accuracy, or of
    their cost: layer_tokens, flops or wall_clock_s."""
    direction: Literal["min", "max"] | None = None
    """Which is better; known for val_loss, val_perplexity and costs."""
    aggregate: Literal["mean", "median"] = "mean"
    """Over the seeds."""
    searcher: OptunaSearch | None = None
    """What chooses the points of the axes; all points of grids, with what is drawn, when left out."""
    scheduler: EarlyStopping | None = None
    """What ends trials early; every trial comes to its end when left out."""
    budget: Budget | None = None
    """What each run may consume, the same for all arms; each trains as long as its job says when left out."""
    claim: Claim | None = None
    """What the sweep is to show; its end says whether it did."""
    most_at_once: int | None = None
    """Trials at the same time; as many as there is room for when left out."""

    def __post_init__(self) -> None:
        if not self.name.strip(".") or not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise ValueError(f"name: want letters, digits, '-', '_' and '.', not dots alone, got {self.name!r}")
        if len(self.name.encode()) > 200:
            raise ValueError(f"name: want at most 200 bytes, got {len(self.name.encode())}")
        for branch, keys in (("set", self.set), ("axes", self.axes)):
            for key in keys:
                self._check_key(branch, key)
        if not self.axes and self._seeds == 1 and len(self.budget.amounts if self.budget else ()) < 2:
            raise ValueError("axes: want at least one key with its values, or several seeds")
        self._check_counts()
        if not self.metric.startswith(_OF_VALIDATION) and self.metric not in _COSTS:
            costs = ", ".join(_COSTS)
            raise ValueError(f"metric: want a figure of validation, such as val_loss, or {costs}; got {self.metric!r}")
        self._check_choice()
        if self.direction is None and self.metric not in _LOWER_IS_BETTER:
            raise ValueError(f"direction: want min or max, for the metric {self.metric}")

    def _check_choice(self) -> None:
        if self.searcher is not None and self.samples > 1:
            raise ValueError("samples: a searcher draws by itself; want searcher.arms")
        if self.searcher is not None and not self.axes:
            raise ValueError("axes: a searcher wants at least one key with its values")
        if self.searcher is not None and self.budget is not None and len(self.budget.amounts) > 1:
            raise ValueError("budget.amounts: a searcher compares arms within one budget; want one amount, or none")
        if self.claim is not None and (self.searcher is not None or self.scheduler is not None):
            raise ValueError("claim: wants all seeds of its arms to their end; leave out searcher and scheduler")
        if self.claim is not None and self._seeds < 2:
            raise ValueError("seeds: a claim wants an interval, and so two of them or more")
        if self.scheduler is not None and self.metric in _COSTS:
            raise ValueError(f"scheduler: wants a metric of validation, such as val_loss, got {self.metric}")

    def _check_key(self, branch: str, key: str) -> None:
        if not key or "=" in key:
            raise ValueError(f"{branch}: want dotted keys of a job, got {key!r}")
        if key in ("name", "run"):
            raise ValueError(f"{branch}: a sweep names its runs by itself; leave out '{key}'")
        if branch == "axes" and key == "seed":
            raise ValueError("axes: the seeds of runs are no axis; want seeds: [1, 2, 3]")
        if branch == "axes" and says_only_where(key):
            raise ValueError(f"axes: '{key}' says where a trial runs, not what it trains; want it in set")
        if branch == "axes" and key in self.set and not self.axes[key].when:
            raise ValueError(f"axes: '{key}' is in set too; want it in one of them")
        if key == _LENGTH and self.budget is not None and (branch == "axes" or self.budget.amounts):
            raise ValueError(f"{branch}: the lengths of runs follow from budget; leave out one of them")

    def _check_counts(self) -> None:
        if not 1 <= self._seeds <= _MOST_SEEDS:
            raise ValueError(f"seeds: want 1 to {_MOST_SEEDS:,} of them, got {self._seeds:,}")
        if isinstance(self.seeds, tuple) and len(set(self.seeds)) < self._seeds:
            raise ValueError("seeds: want each seed once")
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise ValueError(f"samples: want 1 to {_MOST_SAMPLES:,}, got {self.samples:,}")
        if self.samples > 1 and not self.draws:
            raise ValueError("samples: no axis is drawn, so each sample would be the same; want choice or uniform")
        if self.most_at_once is not None and self.most_at_once < 1:
            raise ValueError(f"most_at_once: want at least 1, got {self.most_at_once}")

    @property
    def draws(self) -> bool:
        """Whether an axis is drawn."""
        return any(axis.is_drawn for axis in self.axes.values())

    @property
    def given(self) -> tuple[str, ...]:
        """Keys of a job, beside the axes, that a sweep gives its trials."""
        return ("seed", "name", "run", *([_LENGTH] if self.budget and self.budget.amounts else []))

    @property
    def libraries(self) -> tuple[str, ...]:
        """What has to be installed beside the platform."""
        has_intervals = self._seeds > 1 or (self.budget is not None and len(self.budget.amounts) > 1)
        return (*(["optuna"] if self.searcher else []), *(["scipy"] if has_intervals else []))

    @property
    def _seeds(self) -> int:
        """How many seeds each arm has."""
        return len(self.seeds) if isinstance(self.seeds, tuple) else self.seeds

    @property
    def most_trials(self) -> int:
        """Trials where every axis is there in each of them."""
        if self.searcher is not None:
            return self.searcher.arms * self._seeds
        budgets = max(1, len(self.budget.amounts)) if self.budget else 1
        return (
            self.samples
            * self._seeds
            * budgets
            * prod(len(axis.values) for axis in self.axes.values() if isinstance(axis, Grid))
        )

    @property
    def mode(self) -> Literal["min", "max"]:
        """Which of two values of the metric is better, as Ray Tune says it."""
        return "min" if self.lower_is_better else "max"

    @property
    def lower_is_better(self) -> bool:
        """Of the metric."""
        return self.direction != "max"


def load_sweep(path: Path) -> SweepConfig:
    """Read a sweep file, and check the whole.

    Raises:
        UserError: a key or a value is wrong; the message names it.
    """
    tree = read_mapping(path, "sweep file", keys="'base:' and 'axes:'")
    axes = tree.get("axes")
    if isinstance(axes, dict):
        tree["axes"] = {
            key: {"kind": "grid", "values": one} if isinstance(one, list) else one for key, one in axes.items()
        }
    try:
        return build(SweepConfig, tree, "")
    except UserError as error:
        raise UserError(f"{shown(path)}: {error}") from None
