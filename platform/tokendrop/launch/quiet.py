"""Ray Train without the helpers that a run has no use for.

Ray wakes every actor's process a hundred times a second, idle or not: 1% of a core each, taken from the cores that
train, and where one thread of a matrix product waits the others wait with it.
"""

import contextlib
from typing import Any

import ray
from ray._raylet import RAY_NODE_ID_KEY  # pyright: ignore[reportAttributeAccessIssue]
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.callback import RayTrainCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from tokendrop.launch.cluster import serves_alone

_ABORT_S = 1.5

# of Ray Data, with their namespaces; it starts them again when it needs them
_IDLE = (("datasets_stats_actor", "_dataset_stats_actor"), ("AutoscalingCoordinator", "AutoscalingCoordinator"))


class QuietTorchTrainer(TorchTrainer):
    """`TorchTrainer` that starts only the actors its run needs."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        # the placement group that the cleaner would free goes with the driver; that of a killed one stays for ever
        useless: list[type[RayTrainCallback]] = [PlacementGroupCleanerCallback]
        if not self.datasets:
            useless.append(DatasetsCallback)
        callbacks = [one for one in super()._create_default_callbacks() if type(one) not in useless]
        return [*callbacks, _NoReports()]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        if serves_alone() and not self.datasets:
            settings["scaling_policy"] = AlonePolicy(self.scaling_config)
        return self._run_controller(TrainController, {}, settings)

    def _run_controller(
        self, kind: type[TrainController], environment: dict[str, str], settings: dict[str, Any]
    ) -> Any:
        """As Ray's own, but the controller is gone when this returns or is interrupted.

        Ray's own leaves it to run on, and where Ray ends first its exit can wait for a lock of its own for ever.
        """
        here = {RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        environment = {**get_env_vars_to_propagate(), **environment}
        actor = ray.remote(num_cpus=0, label_selector=here, runtime_env={"env_vars": environment})(kind)
        controller: Any = actor.remote(**settings)
        try:
            ray.get(controller.run.remote())
            return ray.get(controller.get_result.remote())
        except BaseException:  # Ctrl-C and SIGTERM among them
            with contextlib.suppress(Exception):
                ray.get(controller.abort.remote(), timeout=_ABORT_S)
            raise
        finally:
            ray.kill(controller)


class AlonePolicy(FixedScalingPolicy):
    """So many workers, of a cluster that has nobody else to ask for room, and no way to grow."""

    def _send_resource_request(self) -> None:
        """Nothing is asked for."""

    _maybe_send_resource_request = _cancel_resource_request = _send_resource_request


class _NoReports(WorkerGroupCallback):
    """Ends the actor through which workers would agree on what they report to Ray: ours write to the run folder."""

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        ray.kill(worker_group.get_worker_group_state().sync_actor)


def end_idle_actors() -> None:
    """End what Ray Data has left running, on a cluster that serves this process alone."""
    for name, namespace in _IDLE if serves_alone() else ():
        with contextlib.suppress(ValueError):  # never started
            ray.kill(ray.get_actor(name, namespace))
