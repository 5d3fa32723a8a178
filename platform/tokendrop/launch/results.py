"""Where a run keeps its results, also one whose working directory Ray deletes after it."""

import os
from dataclasses import replace
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import is_task_file, is_uri
from tokendrop.config.run import EvaluateConfig
from tokendrop.launch.cluster import in_job_copy
from tokendrop.output import log
from tokendrop.track.mlflow import absolute_uri

RESULTS = "TOKENDROP_RESULTS"
"""The environment variable that names the folder of the results of submitted jobs."""


def with_absolute_paths(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration with absolute paths of what is read and written, so that a run can go on from any folder.

    A submitted job runs in a copy of its working directory, which Ray deletes: there, results lie below
    TOKENDROP_RESULTS, by default `tokendrop` in the home folder of the head. What it reads keeps its relative path,
    which is right in the copy of each node, and in that of the next start.
    """
    root = Path.cwd()
    if in_job_copy(root):
        results = Path(os.environ.get(RESULTS) or Path.home() / "tokendrop").absolute()
        data = replace(config.data, folder=absolute(config.data.folder, results))
        there, place = absolute_in(config, results), config.model.init_from
        is_here = place is not None and Path(place).exists()
        model = config.model if is_here else there.model
        return replace(there, data=data, model=model, evaluate=config.evaluate)
    return absolute_in(config, root)


def absolute_in(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
    """The configuration with absolute paths, relative to `folder` before, of all that is read and written."""

    def corpus(entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(entry if entry == "python" else absolute(entry, folder) for entry in entries)

    data = config.data
    return replace(
        config,
        runs_folder=absolute(config.runs_folder, folder),
        data=replace(
            data,
            corpus=corpus(data.corpus),
            validation_corpus=corpus(data.validation_corpus),
            test_corpus=corpus(data.test_corpus),
            sources=tuple(replace(one, corpus=corpus(one.corpus)) for one in data.sources),
            tokenizer=data.tokenizer and absolute(data.tokenizer, folder),
            folder=absolute(data.folder, folder),
        ),
        model=replace(config.model, init_from=_existing(config.model.init_from, folder)),
        evaluate=_tasks_in(config.evaluate, folder),
        track=replace(config.track, uri=absolute_uri(config.track.uri, folder)),
    )


def _tasks_in(evaluate: EvaluateConfig, folder: Path) -> EvaluateConfig:
    """Where task files and the documents of tasks are read; other tasks are names."""
    return replace(
        evaluate,
        tasks=tuple(absolute(task, folder) if is_task_file(task) else task for task in evaluate.tasks),
        task_data=evaluate.task_data and absolute(evaluate.task_data, folder),
        include=evaluate.include and absolute(evaluate.include, folder),
    )


def _existing(place: str | None, folder: Path) -> str | None:
    """A path as `absolute` gives it where something is there; else it may be a name on Hugging Face's hub."""
    return absolute(place, folder) if place and Path(absolute(place, folder)).exists() else place


def absolute(path: str, folder: Path) -> str:
    """A path, relative to `folder` or to the home folder (`~`) before; a URI stays as it is."""
    return path if is_uri(path) else str(folder / os.path.expanduser(path))


def tell_place(config: ExperimentConfig) -> None:
    """Say where a submitted job keeps its results."""
    if in_job_copy(Path.cwd()):
        log(f"results  {config.runs_folder}; {RESULTS} in the environment of `ray start` names another place")
