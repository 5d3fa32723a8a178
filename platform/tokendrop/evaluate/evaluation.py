"""One evaluation of a run, whole: tasks, held-out loss, and a line in MLflow."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokendrop.data.shards.format import Split
from tokendrop.errors import UserError
from tokendrop.evaluate.harness import run_tasks
from tokendrop.evaluate.held_out import held_out_figures
from tokendrop.evaluate.load import load_run, locate
from tokendrop.output import log
from tokendrop.secrets import redact
from tokendrop.track.mlflow import MlflowMirror
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import read_meta
from tokendrop.train.device import pick_device

HELD_OUT: tuple[Split, ...] = ("validation", "test")


def evaluate_run(
    path: Path, tasks: Sequence[str], include: Path | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Evaluate a run or a checkpoint, and tell MLflow.

    Args:
        path: a run folder, for its newest checkpoint, or a checkpoint.
        tasks, include, limit: as for `run_tasks`; without tasks, held-out loss alone.
    Returns:
        `checkpoint`, `step`, what `run_tasks` returns, and as `validation` and `test` what `held_out_figures` does, or
        None where the run's token shards are gone.
    Raises:
        UserError: there is no checkpoint, as for `run_tasks`, or there is nothing to evaluate on.
    """
    checkpoint, run = locate(path)
    result: dict[str, Any] = {"checkpoint": str(checkpoint), "step": read_meta(checkpoint)["step"]}
    if tasks:
        model, tokenizer, task = load_run(path)
        result |= run_tasks(task.language_model(model.to(pick_device())), tokenizer, tasks, include, limit)
    else:
        result |= {"results": {}, "versions": {}, "n_samples": {}}
    try:
        result |= {split: held_out_figures(path, split) for split in HELD_OUT}
    except UserError as error:
        if not tasks:
            raise
        log(f"validation left out: {error}")
        result |= dict.fromkeys(HELD_OUT)
    log_to_mlflow(run, result)
    return result


def log_to_mlflow(run: Path, result: Mapping[str, Any]) -> None:
    """Add an evaluation's numbers to the run's MLflow run; one line on standard error where that fails."""
    try:
        config, _ = open_run_folder(run)
        if config.track.uri is not None:
            MlflowMirror(run, config).log_evaluation(flat_metrics(result), result["step"])
    except Exception as error:  # tracking must never fail an evaluation, whatever a server or its client does
        reason = redact(" ".join(str(error).split()))[:120] or type(error).__name__
        log(f"mlflow   not reached ({reason}); the results are in this output alone")


def flat_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's numbers as `<task>_<metric>`."""
    metrics = {
        f"{task}_{metric}": value
        for task, scores in result["results"].items()
        for metric, value in scores.items()
        if value is not None
    }
    for split, figures in held_out_of(result).items():
        metrics |= {f"{split}_{name}": value for name, value in figures.items()}
    return metrics


def held_out_of(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Figures of held-out rows by split, of those splits that have rows."""
    return {
        split: {name.removeprefix("val_").removeprefix("test_"): one for name, one in figures.items() if name != "rows"}
        for split in HELD_OUT
        if (figures := result[split]) is not None
    }
