"""The nodes of a local cluster, as Ray's autoscaler starts and ends them: each is a `ray start` of its own.

Each has a temporary folder of its own too, as machines have. In a folder that nodes share, one that joins would unpack
a job's working directory anew, and so remove it under the job's driver.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

import psutil
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

HEAD, HEAD_TYPE = "head", "ray.head.default"
LOG, ENDED = "node.log", "ended.log"
"""What a node says, in its folder; what the last node said that ended by itself, beside the folders."""
_UP = "Ray runtime started"
_OF_RAY = ("CPU", "GPU", "memory", "object_store_memory")  # which `ray start` has options for
_STOP_S = 5.0  # for a node's processes to end by themselves


@dataclass(frozen=True, slots=True)
class _Node:
    tags: dict[str, str]
    process: subprocess.Popen[bytes]
    folder: Path


class LocalNodes(NodeProvider):
    """Processes on this machine instead of machines; Ray's autoscaler calls it, in a process of the head.

    The provider's configuration names the head's `gcs_address` and the `folder` below which nodes get theirs.
    """

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._lock = RLock()
        self._numbers = count(1)
        self._nodes: dict[str, _Node] = {}

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self._lock:
            for name, node in [*self._nodes.items()]:
                if node.process.poll() is not None:  # by itself: for whoever wonders why
                    with suppress(OSError):
                        (node.folder / LOG).replace(node.folder.parent / ENDED)
                    self.terminate_node(name)
            return [name for name in (HEAD, *self._nodes) if tag_filters.items() <= self.node_tags(name).items()]

    def is_running(self, node_id: str) -> bool:
        with self._lock:
            return node_id == HEAD or (node_id in self._nodes and self._nodes[node_id].process.poll() is None)

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        with self._lock:
            if node_id == HEAD:
                return {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: HEAD_TYPE}
            return self._nodes[node_id].tags

    def internal_ip(self, node_id: str) -> str:
        return node_address(int(node_id.rpartition("-")[2]) if node_id != HEAD else 0)

    external_ip = internal_ip

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        for _ in range(count):
            with self._lock:
                number = next(self._numbers)
                name, folder = f"node-{number}", Path(self.provider_config["folder"]) / str(number)
                process = self._start(name, folder, tags[TAG_RAY_USER_NODE_TYPE], resources, node_address(number))
                known = tags | {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
                self._nodes[name] = _Node(known, process, folder)

    def _start(
        self, name: str, folder: Path, node_type: str, resources: dict[str, float], address: str
    ) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True)
        options = {
            "address": self.provider_config["gcs_address"],
            "node-ip-address": address,
            "temp-dir": folder,
            "num-cpus": int(resources.get("CPU", 0)),
            "num-gpus": int(resources.get("GPU", 0)),
            "resources": json.dumps({name: amount for name, amount in resources.items() if name not in _OF_RAY}),
            "object-store-memory": int(resources["object_store_memory"]),
            "dashboard-agent-listen-port": 0,
            "min-worker-port": 0,
            "max-worker-port": 0,
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        # by which the autoscaler knows its nodes again
        environment = {**os.environ, "RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": node_type}
        with (folder / LOG).open("wb") as log:
            return subprocess.Popen(
                [*command, *(f"--{option}={value}" for option, value in options.items())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def terminate_node(self, node_id: str) -> None:
        with self._lock:
            node = self._nodes.pop(node_id, None)
        if node is None:
            return
        left: list[psutil.Process] = []
        with suppress(psutil.Error):
            process = psutil.Process(node.process.pid)
            left = [process, *process.children(recursive=True)]
        node.process.terminate()
        for one in psutil.wait_procs(left, timeout=_STOP_S)[1]:
            with suppress(psutil.Error):
                one.kill()
        node.process.wait()
        shutil.rmtree(node.folder, ignore_errors=True)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config


def node_address(number: int) -> str:
    """A loopback address for each node, 0 for the head's; for 127.0.0.1, Ray would take the machine's own."""
    return f"127.0.{number // 250}.{number % 250 + 2}"


def count_nodes(folder: Path) -> tuple[int, int]:
    """Nodes that are up, and nodes that are coming, of those that have their folders below this one."""
    told: list[str] = []
    for node in folder.glob("*/"):
        with suppress(OSError):  # it has gone by now
            told.append((node / LOG).read_text())
    up = sum(_UP in log for log in told)
    return up, len(told) - up
