"""A run on Ray Train, from its configuration to its summary."""

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import ray.data
import ray.train
from ray.autoscaler.v2.utils import is_autoscaler_v2

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.commit import alone_in
from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect
from tokendrop.launch.following import Follower
from tokendrop.launch.orders import ORDERS
from tokendrop.launch.prepare import Preparation
from tokendrop.launch.process_group import DeviceTorchConfig
from tokendrop.launch.quiet import QuietTorchTrainer, end_idle_actors
from tokendrop.launch.resume import check_goes_on, check_same_rows
from tokendrop.launch.stream import STREAM, RowStreams, StreamedSamples
from tokendrop.launch.watch import Watcher
from tokendrop.launch.worker import WorkerTask, held_out_rows, run_worker
from tokendrop.models.build import check_trainable
from tokendrop.render import say
from tokendrop.track.mlflow import MlflowMirror, absolute_uri
from tokendrop.track.run_folder import (
    CHECKPOINTS,
    begun_run,
    create_run_folder,
    describe_run,
    read_attempts,
    summarize,
)
from tokendrop.train.committed import committed_step
from tokendrop.train.engines.build import check_strategy

_RAY_STATE = "ray"
_LEAVING_S = 10.0  # for the driver before, which was told to stop


def run_training(config: ExperimentConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Train, and return the run's summary.

    Args:
        resume: the folder of an earlier run of this job, to go on from its last checkpoint; the job may name one too.
    Raises:
        UserError: the job is wrong, or another driver trains this very run; nothing was started.
        ray.train.TrainingFailedError: the run failed more often than `scaling.max_restarts`.
    """
    check_trainable(config.model)
    check_strategy(config.train)
    resume = resume or begun_run(config)
    if resume is not None:
        check_goes_on(config, resume)
    connect()
    check_resources(config)
    config = replace(config, track=replace(config.track, uri=absolute_uri(config.track.uri)))
    with Preparation(config) as preparation:
        data = preparation.wait()
        if resume is not None:
            check_same_rows(resume, data)
        run = create_run_folder(config) if resume is None else resume.absolute()
        with alone_in(run, patience_s=_LEAVING_S):
            describe_run(run, config, data)
            mirror = MlflowMirror(run, config) if config.track.uri else None
            if preparation.is_done:
                end_idle_actors()
            with Watcher(run, config, mirror):
                _fit(_task(config, run, data))
            shutil.rmtree(run / _RAY_STATE, ignore_errors=True)
    return {**summarize(run), "mlflow_run_id": mirror.run_id if mirror else None}


def _task(config: ExperimentConfig, run: Path, data: Path) -> WorkerTask:
    is_streamed = config.data.reader == "ray_data"
    return WorkerTask(config=config, run=run, data=data, held_out=held_out_rows(config, data) if is_streamed else None)


def _fit(task: WorkerTask) -> None:
    """Train from the last checkpoint to the end, with the workers that the job's mode has."""
    scaling, plan = task.config.scaling, task.config.plan()
    if scaling.mode == "schedule":
        _follow_plan(task)
        return
    before = len(read_attempts(task.run)[0])
    for fits in count():  # one with `mode: fixed`
        step = committed_step(task.run / CHECKPOINTS)
        if step == plan.steps:
            return
        restarts = len(read_attempts(task.run)[0]) - before - fits
        QuietTorchTrainer(**_settings(task, plan.at(step).workers, max(0, scaling.max_restarts - restarts))).fit()


def _follow_plan(task: WorkerTask) -> None:
    from tokendrop.launch.elastic import PlanTrainer

    config, scaling = task.config, task.config.scaling
    sizes = tuple(legal_sizes(config))
    follower = Follower(plan=config.plan(), sizes=sizes, lead_s=scaling.lead_s, patience_s=scaling.patience_s)
    PlanTrainer(
        follower=follower,
        checkpoints=task.run / CHECKPOINTS,
        autoscaling=is_autoscaler_v2(fetch_from_server=True),
        **_settings(task, (sizes[0], scaling.most_workers), scaling.max_restarts),
    ).fit()


def _settings(task: WorkerTask, workers: int | tuple[int, int], max_restarts: int) -> dict[str, Any]:
    """What Ray Train's trainers are made with.

    Args:
        workers: so many, or between so many.
    """
    scaling = task.config.scaling
    on_gpus = scaling.gpus_per_worker > 0
    streamed = task.config.data.reader == "ray_data"
    return {
        "train_loop_per_worker": _train_loop,
        "train_loop_config": {"task": task},
        "torch_config": DeviceTorchConfig(timeout_s=int(scaling.peer_timeout_s)),
        "scaling_config": ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=on_gpus,
            resources_per_worker={"CPU": scaling.cpus_per_worker}
            | ({"GPU": scaling.gpus_per_worker} if on_gpus else {}),
        ),
        "run_config": ray.train.RunConfig(
            name=_RAY_STATE,
            storage_path=str(task.run),
            failure_config=ray.train.FailureConfig(max_failures=max_restarts),
        ),
        # RowStreams makes the streams; Ray Train asks it for them only where there is a dataset
        "datasets": {STREAM: ray.data.range(1)} if streamed else None,
        "dataset_config": RowStreams(task) if streamed else None,
    }


def _train_loop(settings: dict[str, Any]) -> None:
    task: WorkerTask = settings["task"]
    orders = ORDERS if task.config.scaling.mode == "schedule" else None
    local_rank = ray.train.get_context().get_local_rank()
    run_worker(task, local_rank=local_rank, samples=_streamed_samples(task), orders=orders)


def _streamed_samples(task: WorkerTask) -> StreamedSamples | None:
    """This rank's stream of samples, where the job asks for one."""
    if task.config.data.reader != "ray_data":
        return None
    stream = ray.train.get_dataset_shard(STREAM)
    assert stream is not None
    return StreamedSamples(stream, micro_batch=task.config.train.micro_batch)


def check_resources(config: ExperimentConfig) -> None:
    """Raises UserError where the cluster could never hold the run's workers; without an autoscaler, that is."""
    if is_autoscaler_v2(fetch_from_server=True):
        return  # nodes come when workers ask for them; how many may come is not to be known from here
    scaling, total = config.scaling, ray.cluster_resources()
    most = max(segment.workers for segment in config.plan().segments)
    least = legal_sizes(config)[0] if scaling.mode == "schedule" else most
    for resource, each in (("CPU", scaling.cpus_per_worker), ("GPU", scaling.gpus_per_worker)):
        has = total.get(resource, 0)
        if least * each > has:
            workers = "scaling.workers" if scaling.mode == "fixed" else "the workers of the plan"
            raise UserError(
                f"scaling: {least} workers want {least * each} {resource}s, this cluster has {has:g}; lower {workers}"
                f" or scaling.{resource.lower()}s_per_worker"
            )
        if most * each > has:
            say(f"note     the plan has up to {most} workers, this cluster has {resource}s for {int(has // each)}")


def legal_sizes(config: ExperimentConfig) -> list[int]:
    """Numbers of workers that a run with `mode: schedule` may have, rising."""
    plan, scaling = config.plan_fixed(), config.scaling
    micro_batches = plan.batch.global_batch // plan.batch.micro_batch
    return [size for size in range(scaling.min_workers, scaling.most_workers + 1) if micro_batches % size == 0]
