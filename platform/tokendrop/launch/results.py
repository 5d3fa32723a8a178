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
    """The configuration with absolute paths of what is written, whatever becomes of the working directory.

    A submitted job runs in a copy of its working directory, which Ray deletes: there, they lie below TOKENDROP_RESULTS,
    by default `tokendrop` in the home folder of the head.
    """
    root = Path.cwd()
    if in_job_copy(root):
        root = Path(os.environ.get(RESULTS) or Path.home() / "tokendrop").absolute()
    return replace(
        config,
        runs_folder=str(root / config.runs_folder),
        data=replace(config.data, folder=str(root / config.data.folder)),
        track=replace(config.track, uri=absolute_uri(config.track.uri, root)),
    )


def tell_place(config: ExperimentConfig) -> None:
    """Say where a submitted job keeps its results."""
    if in_job_copy(Path.cwd()):
        say(f"results  {config.runs_folder}; {RESULTS} in the environment of `ray start` names another place")
