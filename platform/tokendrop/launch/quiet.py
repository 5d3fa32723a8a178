"""Ray Train with its controller in the driver's process, and without the helpers that a run has no use for.

Ray wakes every actor's process a hundred times a second, idle or not: 1% of a core each, taken from the cores that
train, and where one thread of a matrix product waits the others wait with it.

Touches what Ray 2.60 keeps to itself, as `elastic` and `standby` do.
"""

import asyncio
import contextlib
import logging
import os
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup, WorkerGroupStateBuilder
from ray.train.v2._internal.logging.logging import SessionFileHandler
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from tokendrop.errors import UserError, first_line
from tokendrop.launch.cluster import serves_alone

# of Ray Data, with their namespaces; it starts them again when it needs them
_IDLE = (("datasets_stats_actor", "_dataset_stats_actor"), ("AutoscalingCoordinator", "AutoscalingCoordinator"))

_FAILED_STARTS = 10  # of a group of workers, in a row, before it is not taken for bad luck any more
_ACTOR_S = 10.0  # for a process that Ray started before the workers


class QuietTorchTrainer(TorchTrainer):
    """`TorchTrainer` that starts only the processes its run needs: the workers.

    A UserError of a worker ends it at once, and is what `fit` raises.
    """

    def fit(self) -> Any:
        try:
            return super().fit()
        except WorkerGroupError as error:
            for mistake in mistakes(error):
                raise mistake from None
            raise

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

    failed_starts = 0
    """Of the run of this process, in a row."""

    def _start(self) -> None:
        """As Ray's own, but a death meanwhile is no reason to end the run, nor to leave the others where they are."""
        try:
            super()._start()
            QuietWorkerGroup.failed_starts = 0
        except (RayError, WorkerGroupStartupFailedError) as error:
            if self._worker_group_state:
                self._worker_group_state.shutdown()
                self._clear_state()
            QuietWorkerGroup.failed_starts += 1
            if QuietWorkerGroup.failed_starts > _FAILED_STARTS:
                raise RuntimeError(
                    f"workers could not be started {_FAILED_STARTS + 1} times in a row ({first_line(error)})"
                ) from error
            raise WorkerGroupStartupFailedError(str(error)) from error

    def _start_impl(self, worker_group_state_builder: WorkerGroupStateBuilder) -> None:
        super()._start_impl(worker_group_state_builder)
        actor: Any = self.get_worker_group_state().sync_actor
        ray.wait([actor.__ray_ready__.remote()], timeout=_ACTOR_S)  # killed as it starts, it may stay
        ray.kill(actor)

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

    def __init__(self, **settings: Any) -> None:
        # its notice of nodes that will go away lets the work go on until they do; an elastic run looks for them itself
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        QuietWorkerGroup.failed_starts = 0
        settings["failure_policy"] = MistakesEndRuns(settings["train_run_context"].run_config.failure_config)
        super().__init__(**settings)

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
        if not serves_alone():  # nodes that were asked for would stay asked for
            self._controller_callback_manager.invoke_best_effort("before_controller_abort")


class MistakesEndRuns(DefaultFailurePolicy):
    """Ray's own, but what the user has to mend is not tried again."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        return (
            FailureDecision.RAISE if mistakes(training_failed_error) else super().make_decision(training_failed_error)
        )


def mistakes(error: TrainingFailedError) -> list[UserError]:
    """The UserErrors of the workers that failed."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return [one for one in failures if isinstance(one, UserError)]


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
