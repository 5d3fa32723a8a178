"""Ray Train without the helpers that a run has no use for.

Ray wakes every actor's process a hundred times a second, idle or not: 1% of a core each, taken from the cores that
train, and where one thread of a matrix product waits the others wait with it.
"""

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup, WorkerGroupStateBuilder
from ray.train.v2._internal.logging.logging import SessionFileHandler

from tokendrop.launch.cluster import serves_alone

# of Ray Data, with their namespaces; it starts them again when it needs them
_IDLE = (("datasets_stats_actor", "_dataset_stats_actor"), ("AutoscalingCoordinator", "AutoscalingCoordinator"))


class QuietTorchTrainer(TorchTrainer):
    """`TorchTrainer` that starts only the processes its run needs: the workers."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        # the placement group that the cleaner would free goes with the driver; that of a killed one stays for ever
        useless: list[type[RayTrainCallback]] = [PlacementGroupCleanerCallback]
        if not self.datasets:
            useless.append(DatasetsCallback)
        return [one for one in super()._create_default_callbacks() if type(one) not in useless]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        if serves_alone() and not self.datasets:
            settings["scaling_policy"] = AlonePolicy(self.scaling_config)
        return QuietController(**settings).run_to_the_end()


class QuietWorkerGroup(WorkerGroup):
    """A group without the actor by which workers agree on what to report to Ray: ours write to the run folder."""

    def _start_impl(self, worker_group_state_builder: WorkerGroupStateBuilder) -> None:
        super()._start_impl(worker_group_state_builder)
        ray.kill(self.get_worker_group_state().sync_actor)  # any sooner, before it is there, Ray may lose sight of it

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        return {} if serves_alone() else WorkerGroup._get_worker_runtime_env(custom_runtime_env)

    def _init_train_context_on_workers(
        self, workers: list[Worker], sync_actor: Any, train_context_args: dict[str, list[Any]]
    ) -> None:
        """As Ray's own, which wants to be called by an actor."""
        settings: Any = {
            "train_run_context": self._train_run_context,
            "synchronization_actor": None,
            "storage_context": self._storage_context,
            "worker_callbacks": self._worker_callbacks_to_propagate,
            "controller_actor": None,
        }
        begun: Any = [
            worker.actor.init_train_context.remote(
                distributed_context=worker.distributed_context,
                **settings,
                **{name: values[rank] for name, values in train_context_args.items()},
            )
            for rank, worker in enumerate(workers)
        ]
        ray.get(begun)
        self._decorate_worker_log_file_paths(workers)


class QuietController(TrainController):
    """Ray's controller, in the driver's process and not an actor's, which takes seconds to start.

    What it has to say goes to Ray's log files alone.
    """

    worker_group_cls = QuietWorkerGroup

    def _start(self) -> None:
        logger = logging.getLogger("ray.train")
        logger.handlers = [one for one in logger.handlers if isinstance(one, SessionFileHandler)]
        super()._start()

    def run_to_the_end(self) -> Any:
        """Run, here; interrupted, end the workers too."""
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            try:
                loop.run_until_complete(self.run())
            except BaseException:  # Ctrl-C and SIGTERM among them
                with contextlib.suppress(Exception):
                    self._end_workers()
                raise
        return self.get_result()

    def _end_workers(self) -> None:
        if self._worker_group:
            for worker in self._worker_group.get_workers():
                ray.kill(worker.actor)
            self._worker_group.abort()


class AlonePolicy(FixedScalingPolicy):
    """So many workers, of a cluster that has nobody else to ask for room, and no way to grow."""

    def _send_resource_request(self) -> None:
        """Nothing is asked for."""

    _maybe_send_resource_request = _cancel_resource_request = _send_resource_request


def end_idle_actors() -> None:
    """End what Ray Data has left running, on a cluster that serves this process alone."""
    for name, namespace in _IDLE if serves_alone() else ():
        with contextlib.suppress(ValueError):  # never started
            ray.kill(ray.get_actor(name, namespace))
