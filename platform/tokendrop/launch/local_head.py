"""The head of a local cluster: Ray's command line, its autoscaler, and what that knows.

Its nodes are those of `local_nodes`: each has the CPUs and GPUs that it is told to have.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokendrop.errors import UserError
from tokendrop.launch.autoscaler_status import AutoscalerStatus, NodeUse, parse_status
from tokendrop.launch.local_nodes import HEAD, HEAD_TYPE, LocalNodes, node_address

HOST = "127.0.0.1"
MARK = "TOKENDROP_CLUSTER"
RAY = (sys.executable, "-m", "ray.scripts.scripts")  # the command `ray`, also where it is not on the PATH

_OBJECT_STORE_BYTES = 400 * 2**20  # of each node, as in a cluster that serves one process
_SHOWN = ("CPU", "GPU")
_STATUS_TIMEOUT_S = 60.0  # of a Ray that starts its own Python on a busy machine
_MOST_NODES, _MOST_CORES, _MOST_IDLE_S = 64, 1024, 10**6  # each node is some processes of this machine


class ClusterError(RuntimeError):
    """The local cluster did not start, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """What a local cluster may grow to, and when it shrinks."""

    min_nodes: int
    max_nodes: int
    cpus_per_node: int
    gpus_per_node: int
    idle_timeout_s: float

    @classmethod
    def parse(cls, nodes: str, **others: Any) -> "ClusterSize":
        """From `1..4`, or `2` for two at all times; raises UserError where a number makes no sense."""
        least, dots, most = nodes.partition("..")
        try:
            size = cls(min_nodes=int(least), max_nodes=int(most if dots else least), **others)
        except ValueError:
            raise UserError(f"--nodes {nodes}: want a number or a range, such as 2 or 1..4") from None
        if not 0 <= size.min_nodes <= size.max_nodes or not 1 <= size.max_nodes <= _MOST_NODES:
            raise UserError(
                f"--nodes {nodes}: want a range that goes up and ends at 1 or more, {_MOST_NODES} at most, such as 0..4"
            )
        for option, value, lowest, highest in (
            ("--cpus-per-node", size.cpus_per_node, 1, _MOST_CORES),
            ("--gpus-per-node", size.gpus_per_node, 0, _MOST_CORES),
            ("--idle-timeout", size.idle_timeout_s, 1, _MOST_IDLE_S),
        ):
            if not lowest <= value <= highest:
                raise UserError(f"{option} {value:g}: want {lowest} to {highest:,}")
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A local cluster, as its state file tells of it."""

    mark: str
    """Its processes have it in their environment, from the head on, and no other process has."""
    address: str
    dashboard: str
    folder: str
    """Ray's temporary folder, with the head's log in it."""
    access: dict[str, str]
    """What Ray wants in the environment of whoever is let in."""
    size: ClusterSize

    @property
    def log(self) -> Path:
        """The file that the head's autoscaler writes what it does to."""
        return Path(self.folder) / "head.log"

    @property
    def nodes(self) -> Path:
        """Below it, each node has a folder from when the autoscaler starts it until it has gone."""
        return Path(self.folder) / "nodes"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the cluster."""
        return {"RAY_ADDRESS": self.address, **self.access}


def start_head(cluster: LocalCluster) -> subprocess.Popen[bytes]:
    """Start `ray start --head --block` in the background; its nodes follow by themselves."""
    folder = Path(cluster.folder)
    folder.mkdir()
    if token := cluster.access.get("RAY_AUTH_TOKEN_PATH"):
        Path(token).touch(mode=0o600)
        Path(token).write_text(secrets.token_hex(32))
    autoscaling = folder / "autoscaling.json"
    autoscaling.write_text(json.dumps(_autoscaling(cluster)))
    options = {
        "port": cluster.address.rpartition(":")[2],
        "node-ip-address": node_address(0),
        "dashboard-host": HOST,
        "dashboard-port": cluster.dashboard.rpartition(":")[2],
        "dashboard-agent-listen-port": free_port(),
        "metrics-export-port": free_port(),
        "ray-client-server-port": free_port(),
        "min-worker-port": 0,
        "max-worker-port": 0,
        "num-cpus": 0,
        "num-gpus": 0,
        "object-store-memory": _OBJECT_STORE_BYTES,
        "autoscaling-config": autoscaling,
        "temp-dir": folder,
    }
    command = [*RAY, "start", "--head", "--block"]
    with cluster.log.open("wb") as log:
        return subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=_environment(cluster),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _environment(cluster: LocalCluster) -> dict[str, str]:
    # addresses of another cluster, and a list of real GPUs, to which Ray would hold the pretended ones
    left_out = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        **cluster.access,
        MARK: cluster.mark,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # jobs say `python`
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # nodes may join; `close_to_others` says that they may not
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_autoscaler_v2": "1",
    }


def _autoscaling(cluster: LocalCluster) -> dict[str, Any]:
    """The autoscaler's configuration: as `ray up` has it, with processes instead of machines."""
    size = cluster.size
    resources = {"CPU": size.cpus_per_node, "GPU": size.gpus_per_node, "object_store_memory": _OBJECT_STORE_BYTES}
    lists = (
        *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
        *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
        *("rsync_exclude", "rsync_filter"),
    )
    return {
        "cluster_name": "local",
        "max_workers": size.max_nodes,
        "upscaling_speed": 100.0,
        "idle_timeout_minutes": size.idle_timeout_s / 60,
        "provider": {
            "type": "external",
            "module": f"{LocalNodes.__module__}.{LocalNodes.__name__}",
            "gcs_address": cluster.address,
            "folder": str(cluster.nodes),
            # without these the autoscaler would install Ray on the nodes by ssh
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "node": {
                "resources": {name: amount for name, amount in resources.items() if amount},
                "node_config": {},
                "min_workers": size.min_nodes,
                "max_workers": size.max_nodes,
            },
        },
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in lists},
    }


def describe(cluster: LocalCluster) -> dict[str, Any]:
    """What the cluster's autoscaler knows: nodes, resources in use, what is asked for.

    Raises:
        ClusterError: the head does not answer.
    """
    status = _ask_autoscaler(cluster)
    return {
        "address": cluster.address,
        "dashboard": cluster.dashboard,
        "environment": cluster.environment,
        "folder": cluster.folder,
        "size": asdict(cluster.size),
        "nodes": sorted(map(_node, status.nodes), key=lambda node: (node["role"], node["id"])),
        "pending": status.pending,
        "resources": _shown(status.use.total),
        "used": _shown(status.use.used),
        "requested": [{"resources": bundle, "count": count} for bundle, count in status.requested],
    }


def _ask_autoscaler(cluster: LocalCluster) -> AutoscalerStatus:
    try:
        # `ray status` would wait for a head that is gone
        socket.create_connection((HOST, int(cluster.address.rpartition(":")[2])), timeout=5).close()
        done = subprocess.run(
            [*RAY, "status", "--verbose", "--address", cluster.address],
            env=_environment(cluster) | {MARK: ""},  # no process of the cluster
            capture_output=True,
            text=True,
            timeout=_STATUS_TIMEOUT_S,
            check=True,
        )
        return parse_status(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"the local cluster at {cluster.address} does not answer; 'tokendrop cluster down' removes it"
        ) from error


def _node(node: NodeUse) -> dict[str, Any]:
    return {
        "id": node.id,
        "role": "head" if node.name == HEAD else "worker",
        "state": "idle" if node.is_idle else "active",
        "resources": _shown(node.total),
        "used": _shown(node.used),
    }


def _shown(amounts: dict[str, float]) -> dict[str, float]:
    return {name: amounts[name] for name in _SHOWN if name in amounts}


def free_port(wanted: int = 0) -> int:
    """The port wanted where it is free, else any."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Ray's servers do
        try:
            listening.bind((HOST, wanted))
        except OSError:
            listening.bind((HOST, 0))
        return listening.getsockname()[1]
