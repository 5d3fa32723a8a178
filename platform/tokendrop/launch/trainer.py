"""A run on Ray Train, from its configuration to its summary."""

import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import ray.data
import ray.train
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import RayActorError

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import ScalingConfig
from tokendrop.data.commit import alone_in
from tokendrop.errors import StorageError, UserError, first_line, storage_failure
from tokendrop.launch.cluster import connect
from tokendrop.launch.following import Follower
from tokendrop.launch.head_watch import HeadWatch
from tokendrop.launch.memory import check_memory
from tokendrop.launch.orders import ORDERS
from tokendrop.launch.prepare import Preparation
from tokendrop.launch.process_group import DeviceTorchConfig
from tokendrop.launch.quiet import QuietTorchTrainer, end_idle_actors
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.resume import check_goes_on, check_same_rows
from tokendrop.launch.room import check_room, legal_sizes, resources_of, text_of
from tokendrop.launch.stream import STREAM, RowStreams, StreamedSamples
from tokendrop.launch.watch import Watcher
from tokendrop.launch.worker import WorkerTask, held_out_rows, run_worker
from tokendrop.models.build import check_trainable
from tokendrop.render import say
from tokendrop.track.journal import note_loss
from tokendrop.track.mlflow import MlflowMirror
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
    config = with_absolute_paths(config)
    check_trainable(config.model)
    check_strategy(config.train)
    check_memory(config)
    resume = resume or begun_run(config)
    if resume is not None:
        check_goes_on(config, resume)
    connect()
    check_room(config)
    with HeadWatch() as head, Preparation(config) as preparation:
        data = preparation.wait()
        if resume is not None:
            check_same_rows(resume, data)
        run = create_run_folder(config) if resume is None else resume.absolute()
        with alone_in(run, patience_s=_LEAVING_S):
            describe_run(run, config, data)
            mirror = MlflowMirror(run, config) if config.track.uri else None
            if preparation.is_done:
                end_idle_actors()
            with Watcher(run, config, mirror) as watcher:
                head.what_now, head.before_exit = f"go on with 'tokendrop train --resume {run}'", watcher.give_up
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
        workers = plan.at(step).workers
        _tell_start(scaling, workers)
        QuietTorchTrainer(**_settings(task, workers, max(0, scaling.max_restarts - restarts))).fit()


def _tell_start(scaling: ScalingConfig, workers: int) -> None:
    say(f"start    {workers} worker{'s' * (workers != 1)} of {text_of(resources_of(scaling))} each")


def _follow_plan(task: WorkerTask) -> None:
    from tokendrop.launch.elastic import PlanTrainer

    config, scaling = task.config, task.config.scaling
    sizes = tuple(legal_sizes(config))
    follower = Follower(plan=config.plan(), sizes=sizes, lead_s=scaling.lead_s, patience_s=scaling.patience_s)
    _tell_start(scaling, follower.target(committed_step(task.run / CHECKPOINTS)))
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
            callbacks=[LossNote(task.run)],
        ),
        # RowStreams makes the streams; Ray Train asks it for them only where there is a dataset
        "datasets": {STREAM: ray.data.range(1)} if streamed else None,
        "dataset_config": RowStreams(task) if streamed else None,
    }


class LossNote(ray.train.UserCallback):
    """Writes why workers were lost into the run's live record."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        if not any(isinstance(error, UserError) for error in worker_exceptions.values()):  # which end the run
            note_loss(self.run, cause_of(worker_exceptions))


def cause_of(failures: Mapping[int, Exception]) -> str:
    """The failure that made the others: a dead worker's peers fail too, because it does not answer them."""
    rank = next((rank for rank, error in failures.items() if isinstance(error, RayActorError)), min(failures))
    return f"rank {rank} ({first_line(failures[rank])})"


def _train_loop(settings: dict[str, Any]) -> None:
    task: WorkerTask = settings["task"]
    orders = ORDERS if task.config.scaling.mode == "schedule" else None
    local_rank = ray.train.get_context().get_local_rank()
    try:
        run_worker(task, local_rank=local_rank, samples=_streamed_samples(task), orders=orders)
    except Exception as error:
        if said := storage_failure(error, task.run):
            go_on = f"with room there, 'tokendrop train --resume {task.run}' goes on"
            raise StorageError(f"{task.run}: can't be written ({said}); what is committed stays; {go_on}") from None
        raise


def _streamed_samples(task: WorkerTask) -> StreamedSamples | None:
    """This rank's stream of samples, where the job asks for one."""
    if task.config.data.reader != "ray_data":
        return None
    stream = ray.train.get_dataset_shard(STREAM)
    assert stream is not None
    return StreamedSamples(stream, micro_batch=task.config.train.micro_batch)
