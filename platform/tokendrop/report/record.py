"""One run as the report reads it: its job, its steps as columns, what happened between them, and what to note."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.report.listing import RunOverview, overview, some_runs
from tokendrop.track.journal import MetricsTail, read_events, steps_table
from tokendrop.track.lineage import Lineage, read_lineage
from tokendrop.track.run_folder import ENVIRONMENT, open_run_folder

Columns = dict[str, np.ndarray]
COLUMNS = (
    "step",
    "loss",
    "val_loss",
    "lr",
    "kept_length",
    "tokens",
    "layer_tokens",
    "flops",
    "world_size",
    "data_time_s",
    "step_time_s",
)
_FIGURES = "val_figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run with at least one step."""

    folder: Path
    config: ExperimentConfig
    steps: Columns
    """By `COLUMNS`, and `seconds`: of training up to each step, validation and pauses left out."""
    events: list[dict[str, Any]]
    glance: RunOverview
    environment: Mapping[str, Any]
    measured: Mapping[str, float]
    """What the last validation measured beside its loss."""
    lineage: Lineage | None = None
    """Where it comes from, if it is a fork: its steps up to there are those of its parent."""

    @property
    def last(self) -> int:
        """The last step that is recorded."""
        return int(self.steps["step"][-1])

    @property
    def is_complete(self) -> bool:
        """Whether it is trained to the end of its plan."""
        return self.last >= self.config.steps

    def notes(self) -> list[str]:
        """What a reader of its curves has to know."""
        said, steps = [], self.steps
        if self.lineage is not None:
            changes = ", ".join(f"{key}={now}, not {was}" for key, (was, now) in self.lineage.changed.items())
            said.append(
                f"is a fork of {self.lineage.name} at step {self.lineage.step:,}, with {changes or 'nothing changed'};"
                " its record and its time up to there are those of that run"
            )
        if not self.is_complete:
            state = "is running" if self.glance.state == "running" else f"has {self.glance.state}"
            said.append(f"{state}, at step {self.last:,} of {self.config.steps:,}")
        if (lacking := self.last - len(steps["step"])) > 0:
            said.append(f"lacks {lacking:,} steps in its record; its training time does too")
        if (bad := steps["step"][~np.isfinite(steps["loss"])]).size:
            said.append(f"has a training loss that is not a number at {bad.size:,} steps, step {bad[0]:,} first")
        validated = ~np.isnan(steps["val_loss"]) if self.has_validation else np.zeros(0, bool)
        if not validated.any():
            said.append("has no validation loss")
        return [f"{self.folder.name} {text}." for text in said]

    @property
    def has_validation(self) -> bool:
        """Whether a validation loss was recorded."""
        return bool((~np.isnan(self.steps["val_loss"])).any())

    def last_validation(self) -> dict[str, float]:
        """The last validation loss that is a number, and what the task makes of it; empty where there is none."""
        losses = self.steps["val_loss"][~np.isnan(self.steps["val_loss"])]
        if not len(losses):
            return {}
        figures = self.config.task.figures(float(losses[-1]), self.measured)
        return {"val_loss": float(losses[-1]), **{f"val_{name}": value for name, value in figures.items()}}

    def marks(self) -> list[tuple[int, str]]:
        """Steps at which it was forked, or the workers changed or were begun again, and what that was."""
        resizes = [(event["resize_at"], event) for event in self.events if "resize_at" in event]
        marks = [(int(step), f"resize, {one['from']} to {one['to']} workers") for step, one in resizes]
        if self.lineage is not None:
            marks.append((self.lineage.step, f"fork, of {self.lineage.name}"))
        planned = [step for step, _ in resizes]
        for event in [event for event in self.events if "attempt_from" in event][1:]:
            if event["attempt_from"] in planned:
                planned.remove(event["attempt_from"])
            else:
                marks.append((int(event["attempt_from"]), f"restart with {event['world_size']} workers"))
        return sorted(marks)

    def seconds_of(self) -> dict[str, float]:
        """Where the time went, as far as it is recorded."""
        data, steps = float(self.steps["data_time_s"].sum()), float(self.steps["step_time_s"].sum())
        pauses = sum(event["pause_s"] for event in self.events if "resize_at" in event)
        parts = {
            "waiting for data": data,
            "the rest of the steps": max(0.0, steps - data),
            "changes of workers": pauses,
        }
        drivers = sum("driver_from" in event for event in self.events)
        if self.is_complete and drivers == 1 and self.glance.hours is not None and self.lineage is None:
            others = self.glance.hours * 3600 - steps - pauses
            parts["start-up, restarts, validation"] = max(0.0, others)
        return parts


def read_record(run: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        UserError: it is none, or has no step yet.
        DamagedDataError: a part of it was cut or changed.
    """
    config, _ = open_run_folder(run)
    table = steps_table(run).select([*COLUMNS, _FIGURES])
    glance = overview(run)
    committed = int(table["step"][-1].as_py()) if len(table) else 0
    if glance.step > committed:  # at work, or it ended before a checkpoint
        table = pa.concat_tables([table, _live(run, committed, table.schema)])
    if not len(table):
        raise UserError(f"{run}: this run has no step yet; want one that has trained")
    steps = {name: table[name].to_numpy() for name in COLUMNS}
    steps["val_loss"] = steps["val_loss"].astype(float)  # null as NaN
    steps["seconds"] = np.cumsum(steps["step_time_s"])
    measured = table[_FIGURES].drop_null()
    return RunRecord(
        folder=run,
        config=config,
        steps=steps,
        events=read_events(run),
        glance=glance,
        environment=_environment(run),
        lineage=read_lineage(run),
        measured=measured[-1].as_py(maps_as_pydicts="strict") if len(measured) else {},
    )


def read_runs(paths: Iterable[Path]) -> tuple[list[RunRecord], list[str]]:
    """The runs of folders, each once, and a note on each that was left out: it is damaged, or has no step.

    Raises:
        UserError: a path has no run, or none of the runs can be read.
    """
    folders: list[Path] = []
    for one in paths:
        folders += [folder for folder in some_runs(one) if folder not in folders]
    records, failures = [], []
    for folder in folders:
        try:
            records.append(read_record(folder))
        except UserError as error:
            failures.append(error)
    if not records:
        raise failures[0]
    return records, [f"Left out: {error}." for error in failures]


def _live(run: Path, committed: int, schema: pa.Schema) -> pa.Table:
    """Steps after the last commit, from the live record; where one was done twice, the last time counts."""
    rows: dict[int, dict[str, Any]] = {}
    for line in MetricsTail(run).read(limit=-1):
        if "attempt_from" in line:
            rows = {step: row for step, row in rows.items() if step <= line["attempt_from"]}
        elif line.get("step", 0) > committed:
            rows[line["step"]] = {name: line[name] for name in COLUMNS}
            rows[line["step"]][_FIGURES] = None if line[_FIGURES] is None else [*line[_FIGURES].items()]
    return pa.Table.from_pylist([rows[step] for step in sorted(rows)], schema)


def _environment(run: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((run / ENVIRONMENT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
