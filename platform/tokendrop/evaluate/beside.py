"""Tasks of lm-eval on the checkpoints of a run while it trains."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import EvaluateConfig
from tokendrop.errors import UserError
from tokendrop.evaluate.evaluation import evaluate_checkpoint
from tokendrop.evaluate.suites import main_metric
from tokendrop.evaluate.tasks import Evaluation, find_tasks
from tokendrop.train.checkpoint_index import kept

_NICE = 19


def evaluation_of(config: EvaluateConfig) -> Evaluation:
    """What a job wants of each checkpoint."""
    return Evaluation(
        tasks=config.tasks,
        include=Path(config.include) if config.include else None,
        task_data=Path(config.task_data) if config.task_data else None,
        limit=config.limit,
        log_samples=config.log_samples,
        validates=False,
    )


def check_tasks(config: ExperimentConfig) -> None:
    """Check, before anything is trained, that the job's tasks can be loaded and that its model can be asked them.

    Raises:
        UserError: one can't, or it can't.
    """
    evaluation = evaluation_of(config.evaluate)
    task = config.task.build(config)
    with torch.device("meta"):
        try:
            task.language_model(task.build_model(seed=0))
        except UserError as error:
            raise UserError(f"evaluate.tasks: {error}") from None
    manager, specs = find_tasks(evaluation.all_tasks, evaluation.include, evaluation.task_data)
    manager.load(specs)


def evaluate_beside(checkpoint: Path, config: EvaluateConfig) -> str:
    """Evaluate a checkpoint in a process of its own; what it came to, in a line."""
    if not config.task_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # those of this machine belong to workers
    if not config.task_cpus:
        run_in_idle_time()
    torch.set_num_threads(config.task_cpus or len(os.sched_getaffinity(0)))
    with kept(checkpoint):
        return in_a_line(evaluate_checkpoint(checkpoint, evaluation_of(config))["results"])


def run_in_idle_time() -> None:
    """Give this thread, and those that it starts, only the time of cores that nobody else wants."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    with suppress(AttributeError, OSError):  # Linux alone has it, and not every sandbox
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def in_a_line(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Each task with what it is judged by, or else its first figure."""
    parts: list[str] = []
    for task, scores in results.items():
        metric = main_metric(scores) or next(iter(scores), None)
        value = scores.get(metric) if metric else None
        parts.append(f"{task} {metric} {value:.4f}" if value is not None else f"{task} not finite")
    return ", ".join(parts)
