"""How long new workers take to be ready: the part of a resize that is neither its checkpoint nor Ray's."""

import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tokendrop.config.experiment import ExperimentConfig

_WORKERS = 2


def measure_restart_s(config: ExperimentConfig) -> float:
    """Seconds until two fresh processes have started, imported what a worker does, met and built the job's model."""
    with tempfile.TemporaryDirectory(prefix="tokendrop-profile-") as folder:
        started = time.perf_counter()
        mp.spawn(_worker, args=(folder, config), nprocs=_WORKERS)
        return time.perf_counter() - started


def _worker(rank: int, folder: str, config: ExperimentConfig) -> None:
    from tokendrop.train.device import pick_device, tune_cpu
    from tokendrop.train.worker import build_engine  # here, where its imports count

    tune_cpu(config.scaling.cpus_per_worker)
    device = pick_device()
    backend = "gloo" if device.type == "cpu" or torch.cuda.device_count() < _WORKERS else "nccl"
    if backend == "nccl":
        device = pick_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=_WORKERS)
    build_engine(config, device)
    dist.barrier()
    dist.destroy_process_group()
