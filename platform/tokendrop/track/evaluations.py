"""Evaluations in a run folder: one folder each, with its figures and files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokendrop.atomic import atomic_write
from tokendrop.data.shards.format import Split

EVALUATIONS, RESULT = "evaluations", "result.json"
HELD_OUT: tuple[Split, ...] = ("validation", "test")
SENT = ".mlflow"  # the MLflow run that has an evaluation


def unsent(run: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The evaluations that MLflow does not have: folder and result."""
    for folder, result in _evaluations(run):
        if not (folder / SENT).exists():
            yield folder, result


def note_sent(folder: Path, run_id: str) -> None:
    """Remember that MLflow has an evaluation."""
    atomic_write(folder / SENT, f"{run_id}\n".encode())


def evaluated_steps(run: Path) -> set[int]:
    """The steps of checkpoints of which there are figures of tasks."""
    return {result["step"] for _, result in _evaluations(run) if result["results"]}


def _evaluations(run: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and result of each evaluation that is whole, by the names of the folders."""
    for path in sorted((run / EVALUATIONS).glob(f"step_*/{RESULT}")):
        if ".partial-" in path.parent.name:
            continue
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError):  # it counts for nothing, and hides no other
            continue
        yield path.parent, result


def flat_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's numbers as `<task>_<metric>`, its standard errors left out."""
    metrics = {
        f"{task}_{metric}": value
        for task, scores in result["results"].items()
        for metric, value in scores.items()
        if value is not None and "_stderr" not in metric
    }
    if result.get("average") is not None:
        metrics[f"{result['suite']}_average"] = result["average"]
    for split, figures in held_out_of(result).items():
        metrics |= {f"{split}_{name}": value for name, value in figures.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def held_out_of(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Figures of held-out rows by split, of those splits that have rows."""
    return {
        split: {name.removeprefix("val_").removeprefix("test_"): one for name, one in figures.items() if name != "rows"}
        for split in HELD_OUT
        if (figures := result[split]) is not None
    }
