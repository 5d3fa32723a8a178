"""The same work on several inputs at once."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect

Input = TypeVar("Input")
Output = TypeVar("Output")


def in_parallel(work: Callable[[Input], Output], inputs: Sequence[Input]) -> list[Output]:
    """What the work gives on each input, each in a Ray task of one core, and of one GPU where the cluster has any.

    Raises:
        UserError: as the work does. The others are not waited for, and end with this process: Ray 2.60 aborts a process
            that cancels a task which ends at that moment.
        RayError: a task failed.
    """
    connect()
    gpus = min(1, int(ray.cluster_resources().get("GPU", 0)))

    def do(one: Any) -> Any:  # Ray wants a function, and the work may be another callable
        return work(one)

    task: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(do)
    started = [task.remote(one) for one in inputs]
    try:
        return ray.get(started)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
