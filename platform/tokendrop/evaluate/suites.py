"""Sets of tasks by name, and one figure for each."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

SUITES = {
    # appendix D.1, by lm-eval's names, whose `race` is RACE-h; its `multirc` judges each answer, while the paper's
    # 0.84% is likely the older exact match over all answers of a question: the averages can't be compared as they are
    "paper": (
        *("hellaswag", "lambada_openai", "triviaqa", "webqs", "winogrande", "piqa", "arc_challenge", "arc_easy"),
        *("anli_r1", "anli_r2", "anli_r3", "openbookqa", "race", "boolq", "copa", "rte", "wsc", "multirc", "record"),
    )
}

_MAIN = ("acc_norm", "acc", "exact_match", "em")
"""Metrics that a task may be judged by, the first that it has."""


def main_metric(scores: Mapping[str, float | None]) -> str | None:
    """What a task is judged by, of what lm-eval gives; None where it has no such metric."""
    found = (name for wanted in _MAIN for name in scores if name.partition(".")[0] == wanted)
    return next(found, None)


def summary(suite: str, results: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    """The mean over a suite's tasks of what each is judged by; the paper's table has it as "Average Acc".

    Returns:
        `suite`, `average`, and as `metrics` the metric of each task.
    """
    metrics = {task: main_metric(results[task]) for task in SUITES[suite]}
    values = [results[task][metric] for task, metric in metrics.items() if metric is not None]
    known = [value for value in values if value is not None]
    average = fmean(known) if len(known) == len(metrics) else None
    return {"suite": suite, "average": average, "metrics": metrics}
