"""How fast two nodes of a Ray cluster sum and gather."""

import os
import socket
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tokendrop.bench.exchange import VALUES, exchange, link_of
from tokendrop.config.run import ScalingConfig
from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect
from tokendrop.schedule.device import Link

_NODES_S = 600.0  # for nodes that a cluster starts for this


def measure_node_link(scaling: ScalingConfig, *, values: int = VALUES, timeout_s: float = _NODES_S) -> Link:
    """Bandwidth and latency between a worker's device on one node and one on another, of the cluster at RAY_ADDRESS.

    Raises:
        UserError: no cluster is there, or no two of its nodes have room for a worker each in time.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        raise UserError("--nodes: want RAY_ADDRESS, the Ray cluster with the nodes to measure; it is not set")
    connect(name="tokendrop profile")
    room: dict[str, float] = {"CPU": scaling.cpus_per_worker}
    if scaling.gpus_per_worker:
        room["GPU"] = scaling.gpus_per_worker
    group = placement_group([room, room], strategy="STRICT_SPREAD")
    try:
        if not group.wait(timeout_s):
            wanted = " and ".join(f"{amount:g} {name}" for name, amount in room.items())
            raise UserError(
                f"--nodes: the Ray cluster at {address} had no two nodes with {wanted} free each within {timeout_s:g} s"
            )
        return link_of(_seconds(group, room, values), values=values)
    finally:
        remove_placement_group(group)
        ray.shutdown()


def _seconds(group: Any, room: dict[str, float], values: int) -> list[list[float]]:
    member: Any = ray.remote(num_cpus=room["CPU"], num_gpus=room.get("GPU", 0))(_Member)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in (0, 1)]
    members = [member.options(scheduling_strategy=place).remote() for place in places]
    meeting = ray.get(members[0].meeting.remote())
    return ray.get([member.exchange.remote(rank, meeting, values) for rank, member in enumerate(members)])[0]


class _Member:
    """A process on a node, with the device that Ray gives it."""

    def meeting(self) -> str:
        """Where the two can meet: a free port of this node."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def exchange(self, rank: int, meeting: str, values: int) -> list[list[float]]:
        device = torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")
        return exchange(rank, meeting, device=device, values=values)
