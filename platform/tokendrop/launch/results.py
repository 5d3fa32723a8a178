"""Where a run keeps its results, also one whose working directory Ray deletes after it."""

import os
from dataclasses import replace
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.launch.cluster import in_job_copy
from tokendrop.render import say
from tokendrop.track.mlflow import absolute_uri

RESULTS = "TOKENDROP_RESULTS"
"""The environment variable that names the folder of the results of submitted jobs."""


def with_absolute_paths(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration with absolute paths of what is read and written, so that a run can go on from any folder.

    A submitted job runs in a copy of its working directory, which Ray deletes: there, results lie below
    TOKENDROP_RESULTS, by default `tokendrop` in the home folder of the head. What it reads keeps its relative path,
    which is right in the copy of each node, and in that of the next start.
    """
    root, data = Path.cwd(), config.data
    if in_job_copy(root):
        root = Path(os.environ.get(RESULTS) or Path.home() / "tokendrop").absolute()
    else:
        data = replace(
            data,
            corpus=absolute_corpus(data.corpus, root),
            sources=tuple(replace(one, corpus=absolute_corpus(one.corpus, root)) for one in data.sources),
            tokenizer=data.tokenizer and absolute(data.tokenizer, root),
        )
    return replace(
        config,
        runs_folder=absolute(config.runs_folder, root),
        data=replace(data, folder=absolute(data.folder, root)),
        track=replace(config.track, uri=absolute_uri(config.track.uri, root)),
    )


def absolute_corpus(corpus: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """The files, folders and globs of a corpus, relative to `folder` before; URIs and `python` stay."""
    return tuple(entry if entry == "python" or "://" in entry else absolute(entry, folder) for entry in corpus)


def absolute(path: str, folder: Path) -> str:
    """A path, relative to `folder` or to the home folder (`~`) before."""
    return str(folder / os.path.expanduser(path))


def tell_place(config: ExperimentConfig) -> None:
    """Say where a submitted job keeps its results."""
    if in_job_copy(Path.cwd()):
        say(f"results  {config.runs_folder}; {RESULTS} in the environment of `ray start` names another place")
