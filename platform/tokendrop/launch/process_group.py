"""The process group of a run's workers, and whether they have the GPUs that the job books."""

import socket
from collections.abc import Sequence
from typing import Any

import ray.train.torch
import torch
from ray.train.torch import TorchConfig

from tokendrop.errors import UserError

_TorchBackend: Any = TorchConfig().backend_cls

Gpu = tuple[str, str | None]
"""A worker's host, and the id of its GPU there; None where torch sees none."""


class _RunBackend(_TorchBackend):
    """Connects the workers; where one is lost on the way, gives the room of all of them back, which Ray would keep."""

    def on_start(self, worker_group: Any, backend_config: "RunTorchConfig") -> None:
        try:
            if backend_config.backend != "gloo":
                check_gpus(worker_group.execute(gpu_of_this_worker))
            super().on_start(worker_group, backend_config)
        except Exception:
            worker_group.abort()
            raise


class RunTorchConfig(TorchConfig):
    """TorchConfig of a run's workers."""

    @property
    def backend_cls(self) -> Any:
        return _RunBackend


def torch_config(*, on_gpus: bool, timeout_s: float) -> RunTorchConfig:
    """Of workers that have booked GPUs, or none; what keeps the others waiting for longer is lost.

    On GPUs by NCCL, and by gloo for what is not: checkpoints are written in the background from the CPU.
    """
    return RunTorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout_s=int(timeout_s))


def gpu_of_this_worker() -> Gpu:
    """This machine's name and the identity of the GPU that Ray has assigned to this worker; None without one."""
    if not torch.cuda.is_available():
        return socket.gethostname(), None
    device = ray.train.torch.get_device()
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def check_gpus(gpus: Sequence[Gpu]) -> None:
    """Raises UserError where a worker has no GPU, or two have the same: NCCL connects each GPU once."""
    seen: set[Gpu] = set()
    for host, gpu in gpus:
        if gpu is None:
            raise UserError(
                f"scaling.gpus_per_worker: Ray counts GPUs on {host} where torch finds none; want a node with GPUs and"
                " a torch built for them, or gpus_per_worker: 0, to train on CPUs"
            )
        if (host, gpu) in seen:
            raise UserError(
                f"scaling.gpus_per_worker: two workers have the same GPU of {host}; want each GPU counted by one Ray"
                " node, and no more workers than GPUs"
            )
        seen.add((host, gpu))
