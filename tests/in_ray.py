"""What Ray's own processes are given by tests: they find it as `tests.in_ray`, and none of the modules beside it."""

import os
import signal
from pathlib import Path
from typing import Any

from tokendrop.launch.process_group import RunTorchConfig
from tokendrop.launch.trainer import run_training


def trial(settings: dict[str, Any]) -> dict[str, Any]:
    """What a trial of a sweep does: a run."""
    return run_training(settings["config"])


class UnluckyBackend(RunTorchConfig().backend_cls):
    """The first two groups of workers each lose one before its process group is there."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        for moment in ("first", "second"):
            if not (backend_config.moments / moment).exists():
                (backend_config.moments / moment).touch()
                os.kill(worker_group.execute_single(1, os.getpid), signal.SIGKILL)
                break
        super().on_start(worker_group, backend_config)


class UnluckyTorchConfig(RunTorchConfig):
    moments: Path

    @property
    def backend_cls(self) -> Any:
        return UnluckyBackend
