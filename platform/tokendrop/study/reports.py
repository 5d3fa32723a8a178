"""What trials report of their validations, by which they are compared."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokendrop.config.task import TaskConfig
from tokendrop.track.journal import MetricsTail

RUN = "run"
"""What a trial of Ray Tune is told: the name of its run."""
Reports = Callable[[str], Iterable[Mapping[str, Any]]]
"""Of a run's validations in earlier starts, in order."""


def progress_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """How far a run is, by a line of its record; nothing where the line is of no step."""
    return {key: line[key] for key in ("step", "loss", "layer_tokens")} if "step" in line else {}


def figures_of(line: Mapping[str, Any], task: TaskConfig) -> dict[str, Any]:
    """The figures of a validation, by a line of a run's record; nothing where the line has none."""
    if line.get("val_loss") is None:
        return {}
    figures = task.figures(line["val_loss"], line.get("val_figures") or {})
    return {"val_loss": line["val_loss"], **{f"val_{name}": value for name, value in figures.items()}}


def reports_of(run: Path, task: TaskConfig) -> list[dict[str, Any]]:
    """All validations of a run so far, in order; one that was done again after a failure once."""
    reports = [{**progress_of(line), **figures_of(line, task)} for line in MetricsTail(run).read(limit=-1)]
    by_step = {report["step"]: report for report in reports if "val_loss" in report}
    return [by_step[step] for step in sorted(by_step)]
