"""Fast resize: the processes of the next group start beforehand, stand by, and become its workers.

Names, as `policy` does, private parts of Ray 2.60. For workers on CPUs: only a process that Ray starts for a worker
knows which GPUs are its own.
"""

import contextlib
import importlib
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import RayTrainWorker, Worker, WorkerGroup, worker_group
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokendrop.elastic.control import RunControl

_IMPORTS = ("torch._dynamo", "ray.data", "tokendrop.launch.train_loop", "tokendrop.launch.worker")
_READY_S = 300.0  # for processes to start and import; many may do so from one slow disk


def import_all(modules: Sequence[str]) -> None:
    """Import what a worker will need, the lazy imports of torch's optimizers included."""
    for module in modules:
        importlib.import_module(module)
    import torch

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


class StandbyPool:
    """The processes that stand by for one run; lives in the process of its controller."""

    def __init__(self, control: RunControl) -> None:
        self.control = control
        self._actors: dict[str, list[Any]] = {}
        """By node."""
        self._importing: list[Any] = []
        self._started_for: tuple[float, int] | None = None
        self._sync_actors = _MadeAhead(worker_group.SynchronizationActor)

    @property
    def nodes(self) -> list[str]:
        """The node of each process."""
        return [node for node, actors in self._actors.items() for _ in actors]

    @property
    def is_ready(self) -> bool:
        """Whether all that were started have imported what they need."""
        importing = self._importing
        return not importing or not ray.wait(importing, num_returns=len(importing), timeout=0)[1]

    def adopt_workers(self) -> None:
        """Let groups of this controller, the only one of its process, be made of these processes."""
        TrainController.worker_group_cls = type("RunStandbyWorkerGroup", (StandbyWorkerGroup,), {"pool": self})
        worker_group.SynchronizationActor = self._sync_actors  # whose process starts as slowly as a worker's

    def start(self, nodes: Sequence[str], size: int, *, group: float) -> None:
        """Start a process on each node, once for a running group and the size of the next one.

        Args:
            group: when the running group started.
        """
        if self._started_for == (group, size) or len(nodes) != size:
            return
        self.end()
        self._started_for = group, size
        actor = ray.remote(num_cpus=0, runtime_env=WorkerGroup._get_worker_runtime_env({}))(RayTrainWorker)
        for node in nodes:
            home = NodeAffinitySchedulingStrategy(node, soft=False)
            self._actors.setdefault(node, []).append(actor.options(scheduling_strategy=home).remote())
        self._importing = [one.execute.remote(import_all, _IMPORTS) for some in self._actors.values() for one in some]
        self._importing += self._sync_actors.start_next()

    def take(self, node: str) -> Any:
        """A process of this node, which is a worker from now on; None where there is none."""
        actors = self._actors.get(node)
        return actors.pop(0) if actors else None

    def end(self) -> None:
        """End the processes that stand by still."""
        for actors in self._actors.values():
            for actor in actors:
                ray.kill(actor)
        self._sync_actors.end_next()
        self._actors, self._importing = {}, []


class _MadeAhead:
    """In the place of Ray's class of an actor that each group of workers has: the next group's is started ahead."""

    def __init__(self, actor_class: Any) -> None:
        self._class, self._next = actor_class, None
        self._options: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}

    def options(self, **options: Any) -> "_MadeAhead":
        self._options = options
        return self

    def remote(self, **settings: Any) -> Any:
        self._settings = settings
        actor, self._next = self._next or self._make(), None
        return actor

    def start_next(self) -> list[Any]:
        """Start one as the last one was made; what is there once its process is ready."""
        self._next = self._make()
        return [self._next.get_world_size.remote()]

    def end_next(self) -> None:
        if self._next:
            ray.kill(self._next)
        self._next = None

    def _make(self) -> Any:
        return self._class.options(**self._options).remote(**self._settings)


class StandbyWorkerGroup(WorkerGroup):
    """A group of workers made of the processes that stand by, as far as there are such."""

    pool: StandbyPool

    def _create_workers(
        self, num_workers: int, placement_group: Any, resources_per_worker: Any, *args: Any, **kwargs: Any
    ) -> list[Worker]:
        placed = time.time()
        workers: list[Worker] = []
        places = placement_group_table(placement_group)["bundles_to_node_id"].items()
        taken = [(index, actor) for index, node in places if (actor := self.pool.take(node))]
        told = [actor.get_metadata.remote() for _, actor in taken]  # of all at once: one by one takes a while for many
        for (index, actor), one in zip(taken, told, strict=True):
            with contextlib.suppress(RayError):
                known: Any = ray.get(one, timeout=_READY_S)
                workers.append(Worker(actor, known, resources_per_worker, placement_group_bundle_index=index))
        self.pool.end()
        filled = {worker.placement_group_bundle_index for worker in workers}
        if missing := [index for index in range(num_workers) if index not in filled]:
            workers += super()._create_workers(len(missing), placement_group, resources_per_worker, missing)
        control = self.pool.control
        control.train([*control.timings, ("placement", placed), ("processes", time.time())])
        return WorkerGroup._assign_worker_ranks(workers)
