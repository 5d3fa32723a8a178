"""One evaluation of a run, whole: tasks, held-out loss, and a line in MLflow."""

import json
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable

from tokendrop.atomic import atomic_folder
from tokendrop.data.shards.format import Split
from tokendrop.errors import UserError
from tokendrop.evaluate.harness import Samples, run_tasks
from tokendrop.evaluate.held_out import held_out_figures
from tokendrop.evaluate.load import load_run, locate
from tokendrop.evaluate.suites import summary
from tokendrop.evaluate.tasks import Evaluation
from tokendrop.output import json_text, log
from tokendrop.secrets import redact, redact_all
from tokendrop.track.mlflow import MlflowMirror
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import read_meta
from tokendrop.train.device import pick_device

EVALUATIONS, RESULT = "evaluations", "result.json"
HELD_OUT: tuple[Split, ...] = ("validation", "test")


def evaluate_run(path: Path, evaluation: Evaluation) -> dict[str, Any]:
    """Evaluate a run or a checkpoint; the result goes into the run folder, below `evaluations`, and to MLflow.

    Args:
        path: a run folder, for its newest checkpoint, or a checkpoint.
    Returns:
        `checkpoint`, `step`, what `run_tasks` returns, of a suite its `summary`, and as `validation` and `test` what
        `held_out_figures` does, or None where the run's token shards are gone or are not to be read.
    Raises:
        UserError: there is no checkpoint, as for `run_tasks`, or there is nothing to evaluate on.
    """
    checkpoint, run = locate(path)
    result: dict[str, Any] = {"checkpoint": str(checkpoint), "step": read_meta(checkpoint)["step"]}
    if not (evaluation.all_tasks or evaluation.validates):
        raise UserError("--no-validation: want --tasks, or there is nothing to evaluate")
    samples: Samples = {}
    if evaluation.all_tasks:
        model, tokenizer, task = load_run(path)
        found, samples = run_tasks(task.language_model(model.to(pick_device())), tokenizer, evaluation)
        result |= found
    else:
        result |= {"results": {}, "versions": {}, "n_samples": {}}
    if evaluation.suite is not None:
        result |= summary(evaluation.suite, result["results"])
    result |= _held_out(path, evaluation)
    log_to_mlflow(run, result, keep(run, result, samples))
    return result


def _held_out(path: Path, evaluation: Evaluation) -> dict[str, Any]:
    """Figures of held-out rows, by split."""
    if not evaluation.validates:
        return dict.fromkeys(HELD_OUT)
    try:
        return {split: held_out_figures(path, split) for split in HELD_OUT}
    except UserError as error:
        if not evaluation.all_tasks:
            raise
        log(f"validation left out: {error}")
        return dict.fromkeys(HELD_OUT)


def keep(run: Path, result: Mapping[str, Any], samples: Samples) -> Path:
    """Write a result down in a folder of its own below the run's, which is returned, with samples beside it."""
    root = run / EVALUATIONS
    stem = f"step_{result['step']}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = next(one for n in count(1) if not (one := root / (stem if n == 1 else f"{stem}-{n}")).exists())
    try:
        with atomic_folder(folder) as partial:
            (partial / RESULT).write_text(json_text(redact_all(result)) + "\n")
            for task, lines in samples.items():
                text = "".join(json.dumps(line, default=handle_non_serializable) + "\n" for line in lines)
                (partial / f"samples_{task}.jsonl").write_text(text)
    except OSError as error:
        log(f"note     {folder}: not written ({error.strerror or error}); the results are in this output alone")
    return folder


def log_to_mlflow(run: Path, result: Mapping[str, Any], folder: Path) -> None:
    """Add an evaluation's numbers and files to the run's MLflow run; one line on standard error where that fails."""
    try:
        config, _ = open_run_folder(run)
        if config.track.uri is not None:
            MlflowMirror(run, config).log_evaluation(flat_metrics(result), result["step"], folder)
    except Exception as error:  # tracking must never fail an evaluation, whatever a server or its client does
        reason = redact(" ".join(str(error).split()))[:120] or type(error).__name__
        log(f"mlflow   not reached ({reason}); the results are in {folder}")


def flat_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's numbers as `<task>_<metric>`."""
    metrics = {
        f"{task}_{metric}": value
        for task, scores in result["results"].items()
        for metric, value in scores.items()
        if value is not None
    }
    if result.get("average") is not None:
        metrics[f"{result['suite']}_average"] = result["average"]
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
