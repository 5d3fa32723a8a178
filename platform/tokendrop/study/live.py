"""The table of a sweep's arms while it goes on, for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokendrop.output import table
from tokendrop.study.arms import Arm
from tokendrop.study.trials import Trial, point_text

_MOST_ROWS = 12
_WIDEST = 60  # characters of an arm's values


def arms_table(
    arms: Sequence[Arm], metric: str, running: Mapping[str, Mapping[str, Any]], *, lower: bool, failed: Sequence[str]
) -> str:
    """A line for each arm: those that train first, then the best.

    Args:
        running: what trials that train have last reported, by their runs.
        lower: whether a lower metric is better.
        failed: runs of the trials that have failed.
    """
    lines = sorted(arms, key=lambda arm: _rank(arm, running, lower=lower))
    rows = [_row(arm, running, failed) for arm in lines[:_MOST_ROWS]]
    text = table(["arm", "seeds", "failed", metric, "std", "training"], rows)
    hidden = len(lines) - _MOST_ROWS
    return f"{text}\n... and {hidden:,} arms more" if hidden > 0 else text


def _rank(arm: Arm, running: Mapping[str, object], *, lower: bool) -> tuple[bool, bool, float]:
    value = arm.value or 0.0
    return not any(trial.run in running for trial in arm.trials), arm.value is None, value if lower else -value


def _row(arm: Arm, running: Mapping[str, Mapping[str, Any]], failed: Sequence[str]) -> list[str]:
    name = point_text(arm.point) or "all"
    lost = sum(trial.run in failed for trial in arm.trials)
    return [
        name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}...",
        f"{len(arm.values)} of {len(arm.trials)}",
        f"{lost}" if lost else "",
        "" if arm.value is None else f"{arm.value:.4g}",
        "" if arm.spread is None else f"{arm.spread:.2g}",
        ", ".join(_now(trial, running[trial.run]) for trial in arm.trials if trial.run in running),
    ]


def _now(trial: Trial, report: Mapping[str, Any]) -> str:
    """Where a trial is."""
    step = report.get("step", 0)
    where = f"{step / trial.plan.steps:.0%}" if trial.plan else f"step {step:,}"
    loss = f" at {report['loss']:.3f}" if "loss" in report else ""
    return f"seed {trial.config.seed} {where}{loss}"
