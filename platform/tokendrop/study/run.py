"""A sweep on Ray Tune, which only schedules: what a trial is and what it leaves behind is that of any run."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune

from tokendrop.config import plugin
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.errors import UserError, first_line
from tokendrop.launch.cluster import connect
from tokendrop.launch.head_watch import HeadWatch
from tokendrop.launch.initial import with_epochs, with_initial
from tokendrop.launch.memory import check_memory
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.room import check_ray, check_room, count_places, resources_of
from tokendrop.launch.stopping import run_until_stopped
from tokendrop.launch.trainer import needs_ray_train
from tokendrop.launch.watch import prepare_line
from tokendrop.output import log
from tokendrop.study.progress import Progress
from tokendrop.study.record import SweepRecord, finished
from tokendrop.study.sweep import SweepConfig
from tokendrop.study.trainable import RUN, TrialRun
from tokendrop.study.trials import Trial
from tokendrop.track.mlflow import ensure_experiment
from tokendrop.train.engines.build import check_strategy

_TUNE = "ray"
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # which prints tables that nothing turns off
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a job mean what they mean to the command
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the run folders have it all
}


def run_sweep(
    sweep: SweepConfig, trials: Sequence[Trial], *, path: Path, retry_failed: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Train every trial that has not been trained yet.

    Args:
        path: of the sweep file.
        retry_failed: whether those that failed in an earlier start are tried again.
    Returns:
        By name of the run folder, summaries of the trials that ended well, and why the others failed.
    Raises:
        UserError: something is wrong with the jobs, the corpus, or the metric.
    """
    jobs = {trial.run: with_absolute_paths(trial.config) for trial in trials}
    record = SweepRecord(Path(jobs[trials[0].run].runs_folder), sweep.name)
    with record.opened(path, trials):
        if retry_failed:
            for trial in trials:
                record.forget_failure(trial.run)
        progress = Progress(sweep, trials, record)
        for trial in trials:
            _look_up(trial, jobs[trial.run], progress)
        left = {trial.run: jobs[trial.run] for trial in trials if progress.is_open(trial.run)}
        for run, job in left.items():
            _check(job, progress.trials[run].text)
        log(f"sweep    {record.folder}: {progress.counts()}")
        if left:
            _train(sweep, left, progress, record)
        return progress.summaries, progress.failures


def _look_up(trial: Trial, job: ExperimentConfig, progress: Progress) -> None:
    """Note what is known of a trial from an earlier start, or another sweep."""
    try:
        summary = finished(job)
    except UserError as error:  # its folder is damaged; the others are not
        progress.note(trial.run, str(error))
        return
    if summary is not None:
        progress.finish(trial.run, summary)
    elif reason := progress.record.failure(trial.run):
        progress.note(trial.run, reason)


def _train(sweep: SweepConfig, jobs: Mapping[str, ExperimentConfig], progress: Progress, record: SweepRecord) -> None:
    connect()
    with HeadWatch() as head:
        ready = _prepared(jobs, progress)
        if not ready:
            return
        first = next(iter(ready.values()))
        check_room(first)
        if first.track.uri:
            _begin_tracking(first)
        head.what_now = "the same command goes on with the sweep"
        tuner = _tuner(sweep, {run: jobs[run] for run in ready}, first, progress, record.folder / _TUNE)

        def fit() -> None:
            tuner.fit()

        with progress:
            run_until_stopped(fit, stop=progress.stop)
    shutil.rmtree(record.folder / _TUNE, ignore_errors=True)
    progress.raise_fault()


def _check(job: ExperimentConfig, which: str) -> None:
    """Raises UserError where a job can't train here, before anything is started."""
    if job.evaluate.tasks:
        raise UserError(
            "evaluate.tasks: trials are not evaluated as they train; want 'set: {evaluate.tasks: []}' in the sweep,"
            " and 'tokendrop evaluate' on their runs"
        )
    for key, name in (("drop.method", job.drop.method), ("task.kind", job.task.kind)):
        if plugin.file_of(name) is not None:
            raise UserError(
                f"{key}: the trials of a sweep can't load the file in {name!r}; want a module that they can import,"
                " as package.module:Class"
            )
    try:
        job.task.build(job)
        check_strategy(job.train)
        check_memory(job)
        check_ray(job.scaling)
    except UserError as error:
        raise UserError(f"trial ({which}): {error}") from None


def _prepared(jobs: Mapping[str, ExperimentConfig], progress: Progress) -> dict[str, ExperimentConfig]:
    """The jobs whose token shards are made, each corpus once; trials that their corpus is no good for have failed.

    Raises:
        UserError: this is so for all trials of the sweep.
    """
    ready: dict[str, ExperimentConfig] = {}
    faults: dict[str, UserError] = {}
    for run, job in jobs.items():
        try:
            begun = with_initial(job)
            if begun.waits_for_epochs:
                begun = with_epochs(begun)
            with prepare_line(begun) as told:
                prepare(begun, progress=told)
            ready[run] = begun
        except UserError as error:
            faults[run] = error
    if faults and not ready and not progress.summaries:
        raise next(iter(faults.values()))
    for run, error in faults.items():
        progress.fail(run, str(error), "")
    return ready


def _begin_tracking(job: ExperimentConfig) -> None:
    """Make MLflow's tables once, before several trials do so at once."""
    try:
        ensure_experiment(job.track)
    except Exception as error:  # a server that is away keeps no trial from training
        log(f"mlflow   not reached ({first_line(error)}); the trials go on without it")


def _tuner(
    sweep: SweepConfig, jobs: Mapping[str, ExperimentConfig], job: ExperimentConfig, progress: Progress, folder: Path
) -> tune.Tuner:
    """
    Args:
        job: of them, with what it left open; where it runs is the same for all.
    """
    os.environ.update(_ENVIRONMENT)
    alone, each = not needs_ray_train(job), resources_of(job.scaling)
    shutil.rmtree(folder, ignore_errors=True)
    return tune.Tuner(
        tune.with_resources(
            tune.with_parameters(TrialRun, trials=dict(jobs), sweep=sweep.name), each if alone else {"CPU": 0}
        ),
        param_space={RUN: tune.grid_search([*jobs])},
        tune_config=tune.TuneConfig(
            max_concurrent_trials=sweep.most_at_once or (None if alone else _most_at_once(job)),
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            verbose=0,
            callbacks=[progress],
            stop=progress.stopper,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run has its own
            failure_config=tune.FailureConfig(max_failures=job.scaling.max_restarts),
        ),
    )


def _trial_name(trial: Any) -> str:
    return trial.config[RUN]


def _most_at_once(job: ExperimentConfig) -> int:
    """Runs of several workers that fit on the nodes there are: each books its own, and Tune knows nothing of them."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max(segment.workers for segment in job.plan.segments) if job.scaling.mode != "fixed" else job.scaling.workers
    return max(1, count_places(nodes, resources_of(job.scaling)) // most)
