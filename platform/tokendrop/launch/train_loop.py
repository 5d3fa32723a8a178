"""Training in a process: as a worker of Ray Train, or in this process alone.

The driver imports this module too. What it does without, and takes seconds, is imported where training starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch

from tokendrop.config.run import ScalingConfig
from tokendrop.elastic.control import RunControl
from tokendrop.errors import StorageError, storage_failure
from tokendrop.launch.draining import DrainNotice
from tokendrop.launch.separate_disks import with_copy
from tokendrop.launch.stream import RankSamples, StreamedSamples
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.run_home import home_of, place_of


def train_loop(settings: dict[str, Any]) -> None:
    """Train as a worker of Ray Train, called by all at once.

    Args:
        settings: `spec` is what the worker is told.
    """
    from tokendrop.launch.worker import never, run_worker

    with with_copy(settings["spec"]) as (spec, home), telling_full_storage(spec.run):
        run_worker(
            spec,
            device=device_of(spec.config.scaling),
            samples=_streamed_samples(spec),
            # with `mode: schedule`, the policy moves the workers
            must_save=never if spec.config.scaling.mode == "schedule" else DrainNotice(),
            home=home,
        )


def fit_in_this_process(spec: WorkerSpec, control: RunControl) -> None:
    """Train a run of one worker without Ray Train around it; not of one that `needs_ray_train`.

    Raises:
        UserError: something is wrong with the job that shows as it trains.
    """
    from tokendrop.launch.worker import run_worker

    with telling_full_storage(spec.run):
        device = torch.device("cuda" if spec.config.scaling.gpus_per_worker else "cpu")
        run_worker(spec, device=device, home=home_of(spec.run))


@contextmanager
def telling_full_storage(run: Path) -> Iterator[None]:
    """Where the block fails because the storage of a run takes nothing more, a StorageError says so."""
    try:
        yield
    except Exception as error:
        if said := storage_failure(error, run):
            go_on = f"with room there, 'tokendrop train --resume {place_of(run)}' goes on"
            raise StorageError(f"{run}: can't be written ({said}); what is committed stays; {go_on}") from None
        raise


def device_of(scaling: ScalingConfig) -> torch.device:
    """The GPU that Ray has assigned to this worker; the CPU where the job books none, though CUDA may see some."""
    return ray.train.torch.get_device() if scaling.gpus_per_worker else torch.device("cpu")


def _streamed_samples(spec: WorkerSpec) -> StreamedSamples | None:
    """This rank's stream of samples, where the job asks for one."""
    config, context = spec.config, ray.train.get_context()
    if config.data.reader != "ray_data":
        return None
    split = replace(config.plan.batch, world_size=context.get_world_size())
    return StreamedSamples(
        RankSamples(
            folder=spec.data,
            config=config,
            split=split,
            rank=context.get_world_rank(),
        )
    )
