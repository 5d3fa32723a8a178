"""The process group of a run's workers: by NCCL for what is on GPUs, by gloo for what is not."""

from dataclasses import replace
from typing import Any

import torch
from ray.train.torch import TorchConfig

_TorchBackend: Any = TorchConfig().backend_cls


class _DeviceBackend(_TorchBackend):
    """Asks a worker what it has: a cluster may count GPUs that are none, and the driver's machine says nothing.

    Checkpoints are written in the background from the CPU, which torch wants a backend for even with one worker.
    """

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        has_gpu = worker_group.execute_single(0, torch.cuda.is_available)
        super().on_start(worker_group, replace(backend_config, backend="cpu:gloo,cuda:nccl" if has_gpu else "gloo"))

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Nothing: the processes end next, and to leave the group in good order may take a worker that is dead."""


class DeviceTorchConfig(TorchConfig):
    """TorchConfig whose backend follows from the workers' device."""

    @property
    def backend_cls(self) -> Any:
        return _DeviceBackend
