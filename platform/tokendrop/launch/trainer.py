"""A run on Ray Train, from its configuration to its summary."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray.data
import ray.train
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.train.torch import TorchConfig

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect
from tokendrop.launch.prepare import Preparation
from tokendrop.launch.quiet import QuietTorchTrainer
from tokendrop.launch.stream import STREAM, RowStreams, StreamedSamples
from tokendrop.launch.watch import Watcher
from tokendrop.launch.worker import WorkerTask, held_out_rows, run_worker
from tokendrop.models.build import check_trainable
from tokendrop.track.mlflow import MlflowMirror, absolute_uri
from tokendrop.track.run_folder import (
    CHECKPOINTS,
    create_run_folder,
    describe_run,
    open_run_folder,
    summarize,
)
from tokendrop.train.checkpoint import committed, read_meta
from tokendrop.train.engines.build import check_strategy

_RAY_STATE, _MISTAKE = "ray", "mistake.txt"


def run_training(config: ExperimentConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Train, and return the run's summary.

    Args:
        resume: the folder of an earlier run of this job, to go on from its last checkpoint.
    Raises:
        UserError: the job is wrong; nothing was started.
        ray.train.TrainingFailedError: the run failed more often than `scaling.max_restarts`.
    """
    check_trainable(config.model)
    check_strategy(config.train)
    if resume is not None:
        check_same_model(config, resume)
    connect()
    check_resources(config)
    config = replace(config, track=replace(config.track, uri=absolute_uri(config.track.uri)))
    with Preparation(config) as preparation:
        data = preparation.wait()
        run = create_run_folder(config) if resume is None else resume.absolute()
        describe_run(run, config, data)
        mirror = MlflowMirror(run, config) if config.track.uri else None
        with Watcher(run, config, mirror):
            try:
                _trainer(_task(config, run, data)).fit()
            finally:
                raise_mistake(run)
    shutil.rmtree(run / _RAY_STATE, ignore_errors=True)
    return {**summarize(run), "mlflow_run_id": mirror.run_id if mirror else None}


def _task(config: ExperimentConfig, run: Path, data: Path) -> WorkerTask:
    is_streamed = config.data.reader == "ray_data"
    return WorkerTask(config=config, run=run, data=data, held_out=held_out_rows(config, data) if is_streamed else None)


def _trainer(task: WorkerTask) -> QuietTorchTrainer:
    scaling = task.config.scaling
    on_gpus = scaling.gpus_per_worker > 0
    streamed = task.config.data.reader == "ray_data"
    return QuietTorchTrainer(
        _train_loop,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if on_gpus else "gloo", timeout_s=int(scaling.peer_timeout_s)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.workers,
            use_gpu=on_gpus,
            resources_per_worker={"CPU": scaling.cpus_per_worker}
            | ({"GPU": scaling.gpus_per_worker} if on_gpus else {}),
        ),
        run_config=ray.train.RunConfig(
            name=_RAY_STATE,
            storage_path=str(task.run),
            failure_config=ray.train.FailureConfig(max_failures=scaling.max_restarts),
        ),
        # RowStreams makes the streams; Ray Train asks it for them only where there is a dataset
        datasets={STREAM: ray.data.range(1)} if streamed else None,
        dataset_config=RowStreams(task) if streamed else None,
    )


def _train_loop(settings: dict[str, Any]) -> None:
    task: WorkerTask = settings["task"]
    try:
        run_worker(task, local_rank=ray.train.get_context().get_local_rank(), samples=_streamed_samples(task))
    except UserError as mistake:  # left for the driver; raised here, Ray would try it again
        (task.run / _MISTAKE).write_text(str(mistake))


def _streamed_samples(task: WorkerTask) -> StreamedSamples | None:
    """This rank's stream of samples, where the job asks for one."""
    if task.config.data.reader != "ray_data":
        return None
    stream = ray.train.get_dataset_shard(STREAM)
    assert stream is not None
    return StreamedSamples(stream, micro_batch=task.config.train.micro_batch)


def raise_mistake(run: Path) -> None:
    """Raises the UserError that a worker met, if one did."""
    mistake = run / _MISTAKE
    if mistake.exists():
        text = mistake.read_text()
        mistake.unlink()
        raise UserError(text)


def check_same_model(config: ExperimentConfig, run: Path) -> None:
    """Raises UserError unless the checkpoints of `run` hold this job's model."""
    open_run_folder(run)
    for checkpoint in committed(run / CHECKPOINTS)[-1:]:
        saved, wanted = read_meta(checkpoint)["model"], asdict(config.model)
        for key in wanted:
            if key != "preset" and saved.get(key) != wanted[key]:
                raise UserError(
                    f"{checkpoint}: a checkpoint of another model: model.{key} is {saved.get(key)} there"
                    f" and {wanted[key]} in this job"
                )


def check_resources(config: ExperimentConfig) -> None:
    """Raises UserError where the cluster could never hold the run's workers; without an autoscaler, that is."""
    if is_autoscaler_v2(fetch_from_server=True):
        return  # nodes come when workers ask for them; how many may come is not to be known from here
    scaling, total = config.scaling, ray.cluster_resources()
    wanted = {
        "CPU": scaling.workers * scaling.cpus_per_worker,
        "GPU": scaling.workers * scaling.gpus_per_worker,
    }
    for resource, count in wanted.items():
        if count > total.get(resource, 0):
            raise UserError(
                f"scaling: {scaling.workers} workers want {count} {resource}s, this cluster has"
                f" {total.get(resource, 0):g}; lower scaling.workers or scaling.{resource.lower()}s_per_worker"
            )
