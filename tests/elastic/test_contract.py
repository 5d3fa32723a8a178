"""Ray's private parts that `elastic` is made for, by name and signature."""

import inspect
from collections.abc import Callable

import pytest
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup

from tokendrop.elastic.policy import ScheduledTrainer, SchedulePolicy
from tokendrop.elastic.standby import StandbyWorkerGroup

OVERRIDDEN = [
    (ScheduledTrainer, "_initialize_and_run_controller", "(self, **controller_init_kwargs)"),
    (SchedulePolicy, "after_controller_start", "(self, train_run_context)"),
    (SchedulePolicy, "on_controller_start_worker_group", "(self, *, scaling_config, num_workers)"),
    (SchedulePolicy, "make_decision_for_non_running_worker_group", "(self)"),
    (
        SchedulePolicy,
        "make_decision_for_running_worker_group",
        "(self, worker_group_state, worker_group_status)",
    ),
    (SchedulePolicy, "_get_num_workers_for_resource_request", "(self)"),
    (
        StandbyWorkerGroup,
        "_create_workers",
        "(self, num_workers, placement_group, resources_per_worker, placement_group_bundle_indices,"
        " starting_world_rank, world_size, replica_group_size)",
    ),
]
CALLED = [
    (SchedulePolicy, "_send_resource_request", "(self)"),
    (SchedulePolicy, "_maybe_send_resource_request", "(self)"),
    (SchedulePolicy, "_get_resize_decision", "(self, num_workers)"),
    (SchedulePolicy, "_autoscaling_coordinator", None),
    (StandbyWorkerGroup, "_assign_worker_ranks", "(workers, starting_world_rank, world_size, replica_group_size)"),
    (StandbyWorkerGroup, "_get_worker_runtime_env", "(custom_runtime_env)"),
]


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Without what Ray adds to the methods of a class once it has made an actor of it."""
    return [one for one in inspect.signature(function).parameters.values() if one.name != "_ray_trace_ctx"]


@pytest.mark.parametrize(
    ("ours", "name", "signature"), OVERRIDDEN + CALLED, ids=lambda value: getattr(value, "__name__", value)
)
def test_ray_has_the_seams_that_ours_are_made_for(ours: type, name: str, signature: str | None) -> None:
    of_ray = next(base for base in ours.__mro__ if base.__module__.startswith("ray.") and name in vars(base))
    if signature is not None:
        parameters = parameters_of(getattr(of_ray, name))
        names = [str(one.replace(annotation=one.empty, default=one.empty)) for one in parameters]
        if any(one.kind is one.KEYWORD_ONLY for one in parameters):
            names.insert([one.kind for one in parameters].index(inspect.Parameter.KEYWORD_ONLY), "*")
        assert f"({', '.join(names)})" == signature
    assert (ours, name) not in [(a, b) for a, b, _ in OVERRIDDEN] or name in vars(ours)


def test_rays_coordinator_recomputes_what_it_reserves_when_it_is_asked_to() -> None:
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor

    parameters = parameters_of(_AutoscalingCoordinatorActor.get_reserved_resources)
    assert [one.name for one in parameters] == ["self", "requester_id", "recompute"]


def test_a_controller_makes_its_groups_of_its_class_attribute() -> None:
    assert "worker_group_cls" in vars(TrainController)
    assert "self.worker_group_cls.create" in inspect.getsource(TrainController._start_worker_group)


def test_a_group_makes_its_synchronization_actor_of_a_name_of_its_module() -> None:
    source = inspect.getsource(WorkerGroup._start_impl)
    assert "SynchronizationActor.options(" in source
    assert "SynchronizationActor" in WorkerGroup._start_impl.__globals__


def test_a_worker_is_made_of_an_actor_and_what_it_says_of_itself() -> None:
    names = [one.name for one in parameters_of(Worker)]
    assert names[:3] == ["actor", "metadata", "resources"]
    assert "placement_group_bundle_index" in names


def test_the_controller_reads_its_settings_from_the_environment_as_it_is_made() -> None:
    """The policy sets them in the controller's process, before that."""
    source = inspect.getsource(TrainController.__init__)
    assert "ENABLE_PREEMPTION_WATCHER_ENV_VAR" in source
    assert "HEALTH_CHECK_INTERVAL_S_ENV_VAR" in source
