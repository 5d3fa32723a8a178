"""Workers in rows and columns, with a process group for each of them."""

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def mesh_of_workers(device: torch.device, sizes: Mapping[str, int], *, timeout_s: float) -> DeviceMesh:
    """A mesh of all workers; neighbours are next to each other in its last dimension.

    `init_device_mesh` would give its groups torch's timeout of 30 minutes, whatever that of all workers is.

    Args:
        sizes: of each dimension, by name; their product is the number of workers.
        timeout_s: a worker that keeps the others of a group waiting longer counts as lost.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups: list[dist.ProcessGroup] = []
    for dim, size in enumerate(sizes.values()):
        members = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        own, _ = dist.new_subgroups_by_enumeration(members, timeout=timedelta(seconds=timeout_s))
        assert isinstance(own, dist.ProcessGroup)
        groups.append(own)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(sizes))
