"""Groups of workers that a plan replaces: their processes start beforehand, stand by, and become workers in time.

Touches, as `elastic` and `quiet` do, what Ray 2.60 keeps to itself.
"""

import contextlib
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group import RayTrainWorker, Worker, WorkerGroup
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokendrop.launch.orders import import_all, set_marks
from tokendrop.launch.quiet import QuietWorkerGroup

_IMPORTS = ("torch._dynamo", "torch.distributed.checkpoint", "ray.data", "tokendrop.launch.trainer")
_READY_S = 300.0  # for processes to start and import; many may do so from one slow disk
PLACE_S = 5.0  # for which room that was seen is waited for; another run may have taken it since

# of the run of this process: what the group that is made went through, each with the time at its end; and processes of
# workers to come, with their nodes
_marks: list[tuple[str, float]] = []
_standbys: list[tuple[str, Any]] = []


def begin_marks() -> None:
    """From here on, take note of what a new group goes through."""
    _marks.clear()
    mark("decision")


def mark(name: str) -> None:
    _marks.append((name, time.time()))


class Marks(WorkerGroupCallback):
    """Hands what was taken note of to rank 0, which writes it down."""

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        mark("process group")
        worker_group.execute_single(0, set_marks, _marks)


def standby_nodes() -> list[str]:
    """The node of each process that stands by."""
    return [node for node, _ in _standbys]


def start_standbys(nodes: list[str]) -> list[Any]:
    """Start a process on each node that becomes a worker later; what is returned is there when they are ready."""
    end_standbys()
    actor = ray.remote(num_cpus=0, runtime_env=QuietWorkerGroup._get_worker_runtime_env({}))(RayTrainWorker)
    for node in nodes:
        home = NodeAffinitySchedulingStrategy(node, soft=False)
        _standbys.append((node, actor.options(scheduling_strategy=home).remote()))
    return [one.execute.remote(import_all, *_IMPORTS) for _, one in _standbys]


def end_standbys() -> None:
    """End the processes that stand by."""
    for _, actor in _standbys:
        ray.kill(actor)
    _standbys.clear()


class PlanWorkerGroup(QuietWorkerGroup):
    """Makes workers of the processes that stand by, and takes note of how long each part of a start takes."""

    def _start(self) -> None:
        self._worker_group_start_timeout_s = PLACE_S
        super()._start()

    def _create_workers(
        self, num_workers: int, placement_group: Any, resources_per_worker: Any, *args: Any, **kwargs: Any
    ) -> list[Worker]:
        mark("placement")
        workers: list[Worker] = []
        for index, node in placement_group_table(placement_group)["bundles_to_node_id"].items():
            at = next((i for i, (home, _) in enumerate(_standbys) if home == node), None)
            if at is not None:
                _, actor = _standbys.pop(at)
                with contextlib.suppress(RayError):
                    known: Any = ray.get(actor.get_metadata.remote(), timeout=_READY_S)
                    workers.append(Worker(actor, known, resources_per_worker, placement_group_bundle_index=index))
        end_standbys()
        taken = {worker.placement_group_bundle_index for worker in workers}
        if missing := [index for index in range(num_workers) if index not in taken]:
            workers += super()._create_workers(len(missing), placement_group, resources_per_worker, missing)
        mark("processes")
        imported: Any = [worker.execute_async(import_all, *_IMPORTS) for worker in workers]
        try:
            ray.get(imported, timeout=_READY_S)
        except RayError:
            for worker in workers:
                ray.kill(worker.actor)
            raise
        mark("imports")
        return WorkerGroup._assign_worker_ranks(workers)
