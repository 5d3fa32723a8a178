"""A run on Ray Train, from its configuration to its summary."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
from ray import cloudpickle
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer

from tokendrop.atomic import exclusive_lock
from tokendrop.config import plugin
from tokendrop.config.drop import DropMethod
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import ScalingConfig
from tokendrop.config.task import TaskConfig
from tokendrop.elastic.control import RunControl
from tokendrop.elastic.decide import ScalingDecider
from tokendrop.errors import UserError
from tokendrop.launch.beside import CheckpointEvaluation, Evaluate
from tokendrop.launch.cluster import connect
from tokendrop.launch.failures import FailFastOnUserError
from tokendrop.launch.head_watch import HeadWatch
from tokendrop.launch.initial import as_begun, with_epochs, with_initial
from tokendrop.launch.memory import check_memory
from tokendrop.launch.prepare import Preparation
from tokendrop.launch.process_group import torch_config
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.resume import check_goes_on, check_same_rows, shards_at_hand, take_up
from tokendrop.launch.room import check_ray, check_room, legal_sizes, resources_of, text_of
from tokendrop.launch.separate_disks import reaching_driver
from tokendrop.launch.stopping import run_until_stopped
from tokendrop.launch.stored import Stored, check_store, kept_in_store
from tokendrop.launch.train_loop import train_loop
from tokendrop.launch.watch import Watcher
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.output import log
from tokendrop.track.decisions import DecidedJob, with_decisions
from tokendrop.track.journal import note_start
from tokendrop.track.mlflow import MlflowMirror
from tokendrop.track.run_folder import begun_run, create_run_folder, describe_run, read_attempts, summarize
from tokendrop.track.run_home import home_of, place_of, steps_done
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step
from tokendrop.train.installed import check_installed

_RAY_STATE = "ray"
_FAILED_STARTS = 10  # in a row, before they are not taken for bad luck any more
_LEAVING_S = 10.0  # for the driver before, which was told to stop


Fit = Callable[[WorkerSpec, RunControl], None]
"""Trains from the last checkpoint to the end, or to where the run is stopped."""


def run_training(
    config: ExperimentConfig,
    *,
    resume: Path | None = None,
    evaluate: Evaluate | None = None,
    fit: Fit | None = None,
) -> dict[str, Any]:
    """Train, and return the run's summary.

    Args:
        resume: the folder of an earlier run of this job, to go on from its last checkpoint; the job may name one too.
        evaluate: what evaluates checkpoints beside training; none of them when left out.
        fit: what trains; Ray Train when left out.
    Raises:
        UserError: the job is wrong, or another driver trains this very run; nothing was started.
        ray.train.TrainingFailedError: the run failed more often than `scaling.max_restarts`.
    """
    config = with_absolute_paths(config)
    config.task.build(config)
    check_installed(config.train)
    check_memory(config)
    check_store(config, resume)
    resume = resume or begun_run(config)
    config = with_initial(config) if resume is None else as_begun(config, resume)
    check_ray(config.scaling)
    send_with_jobs(config.drop, config.task)
    if config.waits_for_epochs:
        config = with_epochs(config)
    if resume is not None:
        check_goes_on(config, resume)
    connect(name=config.name)
    check_room(config)
    shards = shards_at_hand(config, resume) if resume is not None else None
    with HeadWatch() as head, Preparation(config, shards) as preparation:
        data = preparation.wait()
        if resume is not None:
            check_same_rows(resume, data)
        run = create_run_folder(config) if resume is None else resume.absolute()
        with exclusive_lock(run, patience_s=_LEAVING_S), kept_in_store(run) as home:
            if resume is not None:
                take_up(config, resume)  # from what is the newest checkpoint now, here or in the store
            describe_run(run, config, data)
            if home is not None:
                home.begin()
            mlflow_run_id = _train(run, config, data, head, evaluate, fit or fit_on_ray_train)
            shutil.rmtree(run / _RAY_STATE, ignore_errors=True)
            RunControl(run).compiled.unlink(missing_ok=True)
    stored = {"address": home.address} if home else {}
    return {**summarize(run), **stored, "mlflow_run_id": mlflow_run_id}


def _train(
    run: Path, config: ExperimentConfig, data: Path, head: HeadWatch, evaluate: Evaluate | None, fit: Fit
) -> str | None:
    """Train in a run folder, with all that goes on beside it; the id of the run in MLflow, where it is known there."""
    mirror = MlflowMirror(run, config) if config.track.uri else None
    control = RunControl(run)
    control.reset()
    note_start(run, committed_step(run / CHECKPOINTS))
    with Watcher(run, config, mirror) as watcher:
        head.what_now, head.before_exit = f"go on with 'tokendrop train --resume {place_of(run)}'", watcher.give_up
        held_out = config.task.build(config).open(data).held_out() if config.data.reader == "ray_data" else None
        home = home_of(run)
        stored = Stored(address=home.address, driver=home.driver) if home else None
        spec = WorkerSpec(config=config, run=run, data=data, held_out=held_out, stored=stored)
        if fit is not fit_on_ray_train and not needs_ray_train(config):
            watcher.wait_for_tracking()
        with CheckpointEvaluation(run, config, evaluate):
            run_until_stopped(partial(fit, spec, control), stop=control.stop)
    return mirror.run_id if mirror else None


def send_with_jobs(*branches: DropMethod | TaskConfig) -> None:
    """Let workers have branches of a job that are files of the user's, which they can't import by their names.

    Those of a job that has come to this process in this way must be `loaded_here` before.
    """
    for branch in branches:
        if type(branch).__module__.startswith(plugin.FILES):
            cloudpickle.register_pickle_by_value(sys.modules[type(branch).__module__])


def needs_ray_train(config: ExperimentConfig) -> bool:
    """Whether a run has several workers, or a strategy or a reader that wants what Ray Train sets up."""
    is_alone = config.scaling.mode == "fixed" and config.scaling.workers == 1
    return not (is_alone and config.train.strategy == "ddp" and config.data.reader == "memory_map")


def fit_on_ray_train(spec: WorkerSpec, control: RunControl) -> None:
    """Train in workers of Ray Train, one run of it for each part of the plan that it can't do at once.

    Raises:
        UserError: something is wrong with the job that shows as it trains.
        ray.train.TrainingFailedError: workers were lost more often than `scaling.max_restarts`.
    """
    with reaching_driver(spec) as spec:
        _fit(spec, control)


def _fit(spec: WorkerSpec, control: RunControl) -> None:
    begun_before, failed_starts = _begun(spec.run), 0
    while (step := steps_done(spec.run)) < spec.config.steps and not control.is_stopped:
        spec = replace(spec, config=with_decisions(spec.config, spec.run))
        restarts = max(0, _begun(spec.run) - begun_before - 1)
        trainer = _trainer(spec, step, max_restarts=max(0, spec.config.scaling.max_restarts - restarts))
        try:
            trainer.fit()
            failed_starts = 0
        except ray.train.ControllerError as error:
            if control.is_stopped:
                return
            cause = error.controller_failure
            if isinstance(cause, UserError):
                raise cause from None
            failed_starts += 1  # Ray retries a worker that is lost as it starts, but not at each point of its start
            if not isinstance(cause, RayError) or failed_starts > _FAILED_STARTS:
                raise


def _begun(run: Path) -> int:
    """Groups of workers that a run has had, those that followed another by plan left out."""
    attempts, resizes = read_attempts(run)
    return len(attempts) - len(resizes)


def _trainer(spec: WorkerSpec, step: int, *, max_restarts: int) -> TorchTrainer:
    scaling, plan = spec.config.scaling, spec.config.plan
    workers = plan.at(step).workers
    if scaling.mode != "schedule":
        _tell_start(scaling, workers)
        return TorchTrainer(**_settings(spec, workers, max_restarts))
    from tokendrop.elastic.policy import ScheduledTrainer

    sizes = tuple(legal_sizes(spec.config))
    decider = ScalingDecider(plan=plan, sizes=sizes, lead_s=scaling.lead(plan), patience_s=scaling.patience_s)
    _tell_start(scaling, workers)
    settings = _settings(spec, (sizes[0], scaling.most_workers), max_restarts)
    return ScheduledTrainer(DecidedJob(spec.config, spec.run), decider, **settings)


def _tell_start(scaling: ScalingConfig, workers: int) -> None:
    log(f"start    {workers} worker{'s' * (workers != 1)} of {text_of(resources_of(scaling))} each")


def _settings(spec: WorkerSpec, workers: int | tuple[int, int], max_restarts: int) -> dict[str, Any]:
    """What Ray Train's trainers are made with.

    Args:
        workers: so many, or between so many.
    """
    scaling = spec.config.scaling
    return {
        "train_loop_per_worker": train_loop,
        "train_loop_config": {"spec": spec},
        "torch_config": torch_config(on_gpus=scaling.gpus_per_worker > 0, timeout_s=scaling.peer_timeout_s),
        "scaling_config": ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=scaling.gpus_per_worker > 0,
            resources_per_worker=resources_of(scaling),
        ),
        "run_config": ray.train.RunConfig(
            name=spec.run.name,  # as the dashboard shows it
            storage_path=str(spec.run / _RAY_STATE),
            failure_config=ray.train.FailureConfig(max_failures=max_restarts),
            callbacks=[FailFastOnUserError(spec.run)],
        ),
    }
