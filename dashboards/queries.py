"""Panels of dashboards, and how they ask Prometheus."""

from dataclasses import dataclass
from typing import Literal

from tokendrop.track.prometheus import legal_name

CHOSEN = 'run=~"$run", sweep=~"$sweep"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart, or the last value of one query."""

    title: str
    about: str
    unit: str = "none"
    """As Grafana calls it."""
    queries: tuple[tuple[str, str], ...]
    """Legends, and queries of Prometheus."""
    kind: Literal["lines", "stacked", "value"] = "lines"
    log: bool = False
    """A logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """A dashboard: rows of panels."""

    name: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    sweeps_of: str = "progress/step"
    """The metric whose sweeps can be chosen."""
    runs_of: str | None = "progress/step"
    """The metric whose runs can be chosen; None where runs are not."""


def named(metric: str) -> str:
    """The name of a metric in Prometheus."""
    return f"ray_{legal_name(metric)}"


def of_run(metric: str, *, by: str = "run") -> str:
    """A metric of the chosen runs, one line for each; two drivers of a run may be seen at once for a moment."""
    return f"max by ({by}) ({named(metric)}{{{CHOSEN}}})"


def per_second(metric: str) -> str:
    """How much a sum grows in a second, over all drivers of each chosen run."""
    return f"sum by (run) (rate({named(metric)}{{{CHOSEN}}}[$__rate_interval]))"


def line(metric: str, legend: str = "{{run}}") -> tuple[str, str]:
    """The query of one metric."""
    return legend, of_run(metric)


def event(metric: str) -> str:
    """Where a number of a chosen run has just changed."""
    return f"max by (run) (changes({named(metric)}{{{CHOSEN}}}[1m])) > 0"


EVENTS = (
    ("Changes of workers", "events/resizes", "blue"),
    ("Restarts", "events/restarts", "red"),
    ("Checkpoints", "checkpoint/step", "green"),
)
"""What is marked in all charts of runs: names, the numbers that change then, colours."""
