"""One evaluation of a run, whole: tasks, held-out loss, and a line in MLflow."""

import json
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable

from tokendrop.atomic import atomic_folder
from tokendrop.errors import UserError
from tokendrop.evaluate.harness import Samples, run_tasks
from tokendrop.evaluate.held_out import held_out_figures
from tokendrop.evaluate.load import load_run, locate
from tokendrop.evaluate.suites import summary
from tokendrop.evaluate.tasks import Evaluation
from tokendrop.output import json_text, log
from tokendrop.secrets import redact, redact_all
from tokendrop.track.evaluations import EVALUATIONS, HELD_OUT, RESULT
from tokendrop.track.mlflow import MlflowMirror
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import kept, read_meta
from tokendrop.train.device import pick_device


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
    with kept(checkpoint):
        result = evaluate_checkpoint(checkpoint, evaluation)
    tell_mlflow(run)
    return result


def evaluate_checkpoint(checkpoint: Path, evaluation: Evaluation) -> dict[str, Any]:
    """As `evaluate_run`, of a checkpoint that somebody keeps; MLflow is told by whoever tells it of the run.

    Raises:
        UserError: there is nothing to evaluate, and as `evaluate_run`.
    """
    result: dict[str, Any] = {"checkpoint": str(checkpoint), "step": read_meta(checkpoint)["step"]}
    if not (evaluation.all_tasks or evaluation.validates):
        raise UserError("--no-validation: want --tasks, or there is nothing to evaluate")
    samples: Samples = {}
    if evaluation.all_tasks:
        model, tokenizer, task = load_run(checkpoint)
        found, samples = run_tasks(task.language_model(model.to(pick_device())), tokenizer, evaluation)
        result |= found
    else:
        result |= {"results": {}, "versions": {}, "n_samples": {}}
    if evaluation.suite is not None:
        result |= summary(evaluation.suite, result["results"])
    result |= _held_out(checkpoint, evaluation)
    keep(checkpoint.parent.parent, result, samples)
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


def keep(run: Path, result: Mapping[str, Any], samples: Samples) -> None:
    """Write a result down in a folder of its own below the run's, with samples beside it."""
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


def tell_mlflow(run: Path) -> None:
    """Send a run's evaluations to its MLflow run; one line on standard error where that fails."""
    try:
        config, _ = open_run_folder(run)
        if config.track.uri is not None:
            MlflowMirror(run, config).sync_evaluations()
    except Exception as error:  # tracking must never fail an evaluation, whatever a server or its client does
        reason = redact(" ".join(str(error).split()))[:120] or type(error).__name__
        log(f"mlflow   not reached ({reason}); `tokendrop sync {run}` sends what waits in {run / EVALUATIONS}")
