"""`tokendrop evaluate`: held-out loss and lm-eval tasks, with no token dropped."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokendrop.cli.arguments import path, run_here, run_place, whole
from tokendrop.cli.command import Command, Outcome, fail
from tokendrop.config.files import is_task_file, unusable_path
from tokendrop.errors import UserError, cause_of
from tokendrop.output import json_text, log, table
from tokendrop.secrets import redact_all


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is evaluated, and on what."""
    help = "several are evaluated side by side, each in a Ray task"
    parser.add_argument("paths", type=run_place, nargs="+", metavar="RUN_OR_CHECKPOINT", help=help)
    parser.add_argument("--tasks", metavar="A,B", help="names that lm-eval knows, or task files (.yaml)")
    parser.add_argument("--suite", choices=["paper"], help="the paper's 19 zero-shot tasks, and their average")
    parser.add_argument("--include", type=path, metavar="DIR", help="a folder of lm-eval task files")
    parser.add_argument(
        "--task-data", type=path, metavar="DIR", help="documents of tasks as TASK/SPLIT.jsonl, not those of the hub"
    )
    parser.add_argument("--limit", type=whole(1), metavar="N", help="documents of each task (default: all)")
    parser.add_argument(
        "--batch-size", type=whole(1, 2**20), metavar="N", help="sequences at a time (default: by length)"
    )
    parser.add_argument("--log-samples", action="store_true", help="write down each request and what came of it")
    parser.add_argument("--no-validation", action="store_true", help="leave out the held-out rows")
    parser.add_argument("--output", type=path, metavar="FILE", help="write the result there too, as JSON")


def run(options: argparse.Namespace) -> Outcome:
    """Evaluate a run or a checkpoint, or several; exit code 1 where Ray fails.

    Raises:
        UserError: there is no checkpoint, a task is wrong, or there is nothing to evaluate on.
    """
    tasks = [task.strip() for task in (options.tasks or "").split(",") if task.strip()]
    if options.tasks is not None and not tasks:
        raise UserError(f"--tasks: want names such as lambada_openai,piqa; got {options.tasks!r}")
    if overlong := [task for task in tasks if unusable_path(task)]:
        raise UserError(f"--tasks: {unusable_path(overlong[0])}")
    from tokendrop.evaluate.tasks import Evaluation

    check_writable(options.output)
    evaluation = Evaluation(
        tasks=tasks,
        suite=options.suite,
        include=options.include,
        task_data=options.task_data,
        limit=options.limit,
        batch_size=options.batch_size,
        log_samples=options.log_samples,
        validates=not options.no_validation,
    )
    runs = [run_here(path) for path in options.paths]
    results = evaluate_all(runs, evaluation)
    for run in runs:
        put_evaluations(run)
    result = results[0] if len(results) == 1 else {"evaluations": results}
    if options.output is not None:
        options.output.write_text(json_text(redact_all(result)) + "\n")
    return Outcome(result, "\n\n".join(map(evaluation_text, results)))


def put_evaluations(run: Path) -> None:
    """Write what a run has of evaluations to the store that keeps it, if one does; that can fail without harm."""
    from tokendrop.track.run_home import home_of

    try:
        if home := home_of(run):
            home.put_evaluations()
    except UserError as error:
        log(f"note     the evaluation is in {run} alone: {error}")


def evaluate_all(paths: Sequence[Path], evaluation: Any) -> list[dict[str, Any]]:
    """The evaluation of each run or checkpoint: of one in this process, of several in Ray tasks."""
    from tokendrop.evaluate.evaluation import evaluate_run

    if len(paths) == 1:
        return [evaluate_run(paths[0], evaluation)]
    from ray.exceptions import RayError

    from tokendrop.launch.parallel import in_parallel

    # tasks may run in another folder
    evaluation = replace(
        evaluation,
        tasks=[str(Path(task).absolute()) if is_task_file(task) else task for task in evaluation.tasks],
        include=evaluation.include and evaluation.include.absolute(),
        task_data=evaluation.task_data and evaluation.task_data.absolute(),
    )
    try:
        return in_parallel(partial(evaluate_run, evaluation=evaluation), [path.absolute() for path in paths])
    except RayError as error:
        fail(f"the evaluation failed ({cause_of(error)}); what is in the runs' folders stays")


def check_writable(output: Path | None) -> None:
    """Raises UserError where a file can't be written; an empty one is left there."""
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        raise UserError(f"--output: {output}: can't be written ({error.strerror})") from None


def evaluation_text(result: Mapping[str, Any]) -> str:
    """An evaluation as a table."""
    rows = [
        [task, metric, _number(value), _stderr(scores, metric)]
        for task, scores in result["results"].items()
        for metric, value in scores.items()
        if "_stderr" not in metric
    ]
    if "suite" in result:
        rows.append([result["suite"], "average", _number(result["average"]), ""])
    from tokendrop.track.evaluations import held_out_of

    for split, figures in held_out_of(result).items():
        rows += [[split, name, _number(value), ""] for name, value in figures.items()]
        rows.append([split, "rows", f"{result[split]['rows']:,}", ""])
    return f"{result['checkpoint']}\n\n" + table(["task", "metric", "value", "stderr"], rows)


def _stderr(scores: Mapping[str, float | None], metric: str) -> str:
    """The standard error beside a metric, or nothing; `acc.strict` has `acc_stderr.strict`."""
    name, dot, kind = metric.partition(".")
    value = scores.get(f"{name}_stderr{dot}{kind}")
    return "" if value is None else _number(value)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"


COMMAND = Command(
    "evaluate",
    run,
    arguments,
    about="Held-out loss and lm-eval tasks of a run or a checkpoint, with no token dropped; MLflow is told.",
    example="tokendrop evaluate runs/gpt --tasks lambada_openai,tasks/copa.yaml --limit 100",
    extra="eval",
)
