"""What the workers of a run tell each other beside the training itself, by the group that they train in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def broadcast_from_rank_0(number: int) -> int:
    """The number that rank 0 calls this with; called by all ranks at once."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    said = torch.tensor(number)
    dist.broadcast(said, 0)
    return int(said)


@contextmanager
def patient_group(timeout_s: float = 3600.0) -> Iterator[Any]:
    """A gloo group of all ranks in which they may wait long for each other; None for one process alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield None
        return
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def all_do(work: Callable[[], T], group: Any) -> list[T]:
    """What the work of each rank returns, by rank; called by all ranks of a group at once.

    Raises:
        Exception: on all of them, what the work of one has raised.
    """
    own: list[T | Exception] = []
    try:
        own.append(work())
    except Exception as error:
        own.append(error)
    found = own if group is None else [own[0]] * dist.get_world_size(group)
    if group is not None:
        dist.all_gather_object(found, own[0], group=group)
    done: list[T] = []
    for one in found:
        if isinstance(one, Exception):
            raise one
        done.append(one)
    return done


def gather_on_rank_0(own: T) -> list[T]:
    """On rank 0 what each rank calls this with, by rank, and nothing on the others; called by all ranks at once.

    It goes through memory alone, as a pickle.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    everything: list[T] = [own] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(own, everything or None, 0)
    return everything
