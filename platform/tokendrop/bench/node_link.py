"""How fast two nodes of a Ray cluster sum and gather."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tokendrop.bench.exchange import VALUES, exchange, link_of
from tokendrop.config.run import ScalingConfig
from tokendrop.errors import UserError, first_line
from tokendrop.launch.cluster import connect
from tokendrop.launch.room import resources_of, text_of
from tokendrop.schedule.device import DeviceProfile, Link

_NODES_S = 600.0  # for nodes that a cluster starts for this


def measure_node_link(
    scaling: ScalingConfig, *, log: Callable[[str], None], values: int = VALUES, timeout_s: float = _NODES_S
) -> tuple[Link, str]:
    """Bandwidth and latency between two workers on a node each, of the cluster at RAY_ADDRESS, and their backend.

    A node with several network cards may send more than one of its devices does.

    Raises:
        UserError: no cluster is there, no two of its nodes have room for a worker each in time, or they can't meet.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        raise UserError("--nodes: want RAY_ADDRESS, the address of the Ray cluster whose nodes are to be measured")
    if bool(scaling.gpus_per_worker) != torch.cuda.is_available():
        raise UserError(
            "--nodes: want scaling.gpus_per_worker of 1 on a machine with a GPU and of 0 on one without, so that step"
            f" times and links are of the same devices; got {scaling.gpus_per_worker:g}"
        )
    connect(name="tokendrop profile")
    room = resources_of(scaling)
    log(f"nodes    waiting for two with {text_of(room)} each")
    group = placement_group([room, room], strategy="STRICT_SPREAD")
    try:
        if not group.wait(timeout_s):
            raise UserError(
                f"--nodes: the Ray cluster at {address} had no two nodes with {text_of(room)} free within"
                f" {timeout_s:g} s; want two, or less for a worker"
            )
        seconds = _seconds(group, scaling, values)
    except RayError as error:
        raise UserError(f"--nodes: two nodes of {address} could not be measured ({first_line(error)})") from None
    finally:
        remove_placement_group(group)
        ray.shutdown()
    link, backend = link_of(seconds, values=values), "nccl" if scaling.gpus_per_worker else "gloo"
    log(f"nodes    {link.bytes_per_s / 1e6:.4g} MB/s, {link.latency_s * 1e6:.4g} us between two by {backend}")
    return link, backend


def with_node_link(profile: DeviceProfile, link: Link, backend: str) -> DeviceProfile:
    """A profile with a link between nodes that was measured by one device on each of two."""
    told = f"{profile.source} Links between nodes: one device on each of two nodes of a Ray cluster, by {backend}."
    return replace(profile, between_nodes=link, source=told)


def _seconds(group: Any, scaling: ScalingConfig, values: int) -> list[list[float]]:
    member: Any = ray.remote(num_cpus=scaling.cpus_per_worker, num_gpus=scaling.gpus_per_worker)(_Member)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in (0, 1)]
    members = [member.options(scheduling_strategy=place).remote() for place in places]
    meeting = ray.get(members[0].meeting.remote())
    timeout = timedelta(seconds=scaling.peer_timeout_s)
    return ray.get([one.exchange.remote(rank, meeting, values, timeout) for rank, one in enumerate(members)])[0]


class _Member:
    """A process on a node, with the device that Ray gives it."""

    def meeting(self) -> str:
        """Where the two can meet: a free port of this node."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def exchange(self, rank: int, meeting: str, values: int, timeout: timedelta) -> list[list[float]]:
        device = torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")
        return exchange(rank, meeting, device=device, values=values, timeout=timeout)
