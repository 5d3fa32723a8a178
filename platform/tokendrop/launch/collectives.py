"""What the workers of a run tell each other beside the training itself, by the group that they train in."""

from typing import TypeVar

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


def all_say(yes: bool) -> bool:
    """Whether all ranks call this with True; called by all at once."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return yes
    said = torch.tensor(int(yes))
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)


def gather_on_rank_0(own: T) -> list[T]:
    """On rank 0 what each rank calls this with, by rank, and nothing on the others; called by all ranks at once.

    It goes through memory alone, as a pickle.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    everything: list[T] = [own] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(own, everything or None, 0)
    return everything
