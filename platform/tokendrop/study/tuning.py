"""Ray Tune, which only schedules the trials of a sweep: what a trial is and leaves behind is that of any run."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.launch.room import count_places, resources_of
from tokendrop.launch.stopping import run_until_stopped
from tokendrop.launch.trainer import needs_ray_train
from tokendrop.study.early_stopping import scheduler_for
from tokendrop.study.progress import Progress
from tokendrop.study.reports import RUN, reports_of
from tokendrop.study.schedulers import EndedTrial
from tokendrop.study.sweep import SweepConfig
from tokendrop.study.trainable import Jobs, TrialRun
from tokendrop.study.trials import Trial, TrialMaker
from tokendrop.track.run_folder import open_run_folder

_TUNE = "ray"
_NEXT_TO_NOTHING = {"memory": 1}  # bytes: Tune starts no trial that holds nothing, and a core of a node may be missing
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # which prints tables that nothing turns off
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a job mean what they mean to the command
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the run folders have it all
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # not every report is of a validation
}


def train_all(jobs: Mapping[str, ExperimentConfig], ready: Mapping[str, ExperimentConfig], progress: Progress) -> None:
    """Train all jobs that are ready.

    Args:
        jobs: as their runs get them.
        ready: those whose data are prepared, with what they left open.
    Raises:
        UserError: the metric is none that they report, or their kept lengths leave no room to stop them early.
    """
    if not ready:
        return
    first = next(iter(ready.values()))
    ended = [trial for trial in progress.trials.values() if _has_ended(trial, progress)]
    scheduler = _scheduler(progress, _all_jobs(ready, progress))
    for trial in ended:
        _recall(scheduler, trial)
    chosen = tune.TuneConfig(max_concurrent_trials=_most_at_once(progress.sweep, first), scheduler=scheduler)
    space = {RUN: tune.grid_search([*ready])}
    _fit(_tuner({run: jobs[run] for run in ready}, first, progress, chosen, space), progress)


def search_all(
    maker: TrialMaker,
    first: ExperimentConfig,
    progress: Progress,
    *,
    begun: Callable[[Trial], ExperimentConfig | None],
) -> None:
    """Train the trials that the sweep's searcher chooses.

    Args:
        first: the job that all trials begin with, prepared.
        begun: the job of a trial, or None where one knows what became of it; raises UserError where it can't train.
    Raises:
        UserError: as `train_all`.
    """
    from tokendrop.study.search import ArmSearch

    sweep, record, jobs = progress.sweep, progress.record, Jobs()
    scheduler = _scheduler(progress, [first])

    def begin(trial: Trial) -> float | None:
        progress.trials[trial.run] = trial
        record.add([trial])
        try:
            job = begun(trial)
        except UserError as error:  # the others go on
            progress.fail(trial.run, str(error), "")
            job = None
        if job is not None:
            jobs[trial.run] = job
        if _has_ended(trial, progress):
            _recall(scheduler, trial)
        return progress.value(trial.run)

    chosen = tune.TuneConfig(
        search_alg=ArmSearch(sweep, maker, begin=begin, remember=record.note_chosen, remembered=record.chosen()),
        scheduler=scheduler,
        num_samples=-1,  # until the searcher has no more
        max_concurrent_trials=_most_at_once(sweep, first) or _places(first),
    )
    _fit(_tuner(jobs, first, progress, chosen, {}), progress)


def _scheduler(progress: Progress, jobs: Iterable[ExperimentConfig]) -> Any:
    sweep, record = progress.sweep, progress.record
    if sweep.scheduler is None:
        return None

    def earlier(run: str) -> list[dict[str, Any]]:
        return reports_of(record.run_folder(run), progress.trials[run].config.task)

    return scheduler_for(
        sweep.scheduler, jobs, metric=sweep.metric, mode=sweep.mode, earlier=earlier, are_all=sweep.searcher is None
    )


def _all_jobs(ready: Mapping[str, ExperimentConfig], progress: Progress) -> Iterator[ExperimentConfig]:
    """The jobs of all trials, so that each start compares them from the same layer tokens on."""
    for trial in progress.trials.values():
        if trial.run in ready or not trial.config.waits_for_epochs:
            yield ready.get(trial.run, trial.config)
            continue
        with suppress(UserError):  # its run is gone
            yield open_run_folder(progress.record.run_folder(trial.run))[0]


def _has_ended(trial: Trial, progress: Progress) -> bool:
    """Whether a trial has come to its end, or was ended early, in an earlier start."""
    return trial.run in progress.summaries or trial.run in progress.stopped


def _recall(scheduler: Any, trial: Trial) -> None:
    """Let a sweep's scheduler, where it has one, compare with a trial that Tune is not told of."""
    if scheduler is not None:
        scheduler.on_trial_add(None, EndedTrial(trial.run))


def _fit(tuner: tune.Tuner, progress: Progress) -> None:
    def fit() -> None:
        tuner.fit()

    with progress:
        run_until_stopped(fit, stop=progress.stop)
    shutil.rmtree(progress.record.folder / _TUNE, ignore_errors=True)
    progress.raise_fault()


def _tuner(
    jobs: Mapping[str, ExperimentConfig] | Jobs,
    job: ExperimentConfig,
    progress: Progress,
    chosen: tune.TuneConfig,
    space: dict[str, Any],
) -> tune.Tuner:
    """
    Args:
        job: one of them, with what it left open; where it runs is the same for all.
        chosen: which trials, when, and which of them to their end.
    """
    os.environ.update(_ENVIRONMENT)
    folder = progress.record.folder / _TUNE
    shutil.rmtree(folder, ignore_errors=True)
    each: Any = _NEXT_TO_NOTHING if needs_ray_train(job) else resources_of(job.scaling)
    return tune.Tuner(
        tune.with_resources(tune.with_parameters(TrialRun, trials=jobs, folder=str(Path.cwd())), each),
        param_space=space,
        tune_config=replace(
            chosen, reuse_actors=True, trial_name_creator=_trial_name, trial_dirname_creator=_trial_name
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


def _most_at_once(sweep: SweepConfig, job: ExperimentConfig) -> int | None:
    """Trials at the same time; None where Tune counts what each of them holds."""
    return sweep.most_at_once or (_places(job) if needs_ray_train(job) else None)


def _places(job: ExperimentConfig) -> int:
    """Runs that fit on the nodes there are; those of several workers book their own, which Tune knows nothing of."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max(segment.workers for segment in job.plan.segments) if job.scaling.mode != "fixed" else job.scaling.workers
    return max(1, count_places(nodes, resources_of(job.scaling)) // most)
