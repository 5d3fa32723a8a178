"""Workers that change by plan, by accident and as the cluster allows: nothing of it shows in what is trained."""

import inspect
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs import FLOAT64, config_of, kill_at, losses, write_job
from tokendrop.errors import UserError
from tokendrop.launch.elastic import PlanController, PlanPolicy, PlanTrainer
from tokendrop.launch.quiet import AlonePolicy, MistakesEndRuns, QuietController, QuietTorchTrainer, QuietWorkerGroup
from tokendrop.launch.standby import PlanWorkerGroup
from tokendrop.launch.trainer import run_training
from tokendrop.track.audit import audit
from tokendrop.track.run_folder import read_attempts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SIXTEEN = ("train.length=16 steps", "checkpoint.every=5 steps", "evaluate.every=8 steps")


def segments(*sizes: tuple[str, int]) -> str:
    return f"scaling.segments=[{', '.join(f'{{from: {start}, workers: {workers}}}' for start, workers in sizes)}]"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a corpus, whose token shards the runs share."""
    return write_job(tmp_path_factory.mktemp("elastic"))


def trained(job: Path, *overrides: str) -> dict[str, Any]:
    return run_training(config_of(job, *SIXTEEN, *overrides))


@pytest.fixture(scope="module")
def fixed(job: Path, ray_cluster: None) -> list[float]:
    """The losses of one worker that nothing happens to."""
    return losses(Path(trained(job)["run"]))


def stretches(run: str) -> list[tuple[int, int, int | None]]:
    found = audit(Path(run))
    assert found.is_clean
    return [(one.from_step, one.to_step, one.world_size) for one in found.world_sizes]


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("fit_per_segment", [(0, 1), (8, 2)]), ("schedule", [(0, 1), (4, 2), (12, 1)])],
)
def test_workers_that_change_by_plan_do_not_show_in_samples_or_losses(
    job: Path, fixed: list[float], mode: str, sizes: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = segments(*((f"{start} steps", workers) for start, workers in sizes))
    result = trained(job, f"scaling.mode={mode}", plan)
    np.testing.assert_allclose(losses(Path(result["run"])), fixed, rtol=FLOAT64)
    changes = [(start, before, after) for (_, before), (start, after) in pairwise(sizes)]
    ends = [*(start for start, _ in sizes[1:]), 16]
    planned = [(start + 1, end, workers) for (start, workers), end in zip(sizes, ends, strict=True)]
    assert stretches(result["run"]) == planned
    assert (result["resizes"], result["restarts"]) == (len(changes), 0)
    _, pauses = read_attempts(Path(result["run"]))
    assert [(one["resize_at"], one["from"], one["to"]) for one in pauses] == changes
    for one in pauses:
        assert sum(one["parts_s"].values()) == pytest.approx(one["pause_s"])
        assert min(one["parts_s"].values()) >= 0
    said = capsys.readouterr().err
    assert all(f"resize   {before} -> {after} workers at step {start}: " in said for start, before, after in changes)
    assert "a worker was lost" not in said


def test_a_worker_killed_on_a_full_cluster_costs_no_sample_and_the_plan_goes_on(job: Path) -> None:
    longer = ("train.length=200 steps", "checkpoint.every=40 steps", "evaluate.every=100 steps")
    runs = job.parent / "killed"
    killer = threading.Thread(target=kill_at, args=(runs, 50))
    killer.start()
    plan = segments(("0%", 2), ("160 steps", 1))
    full = ("scaling.mode=schedule", "scaling.cpus_per_worker=2", plan)  # all that there is
    result = trained(job, *longer, *full, f"runs_folder={runs}")
    killer.join()
    assert (result["resizes"], result["restarts"]) == (1, 1)
    assert stretches(result["run"]) == [(1, 160, 2), (161, 200, 1)]


def test_a_cluster_that_has_less_than_the_plan_wants_gives_what_it_has(
    job: Path, fixed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = segments(("0%", 4), ("12 steps", 1))
    result = trained(job, "scaling.mode=schedule", "scaling.cpus_per_worker=2", plan, "scaling.patience_s=1")
    np.testing.assert_allclose(losses(Path(result["run"])), fixed, rtol=FLOAT64)
    assert stretches(result["run"]) == [(1, 12, 2), (13, 16, 1)]
    assert "note     the plan has up to 4 workers, this cluster has CPUs for 2" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "cpus"), [("schedule", 5), ("fit_per_segment", 2)])
def test_a_cluster_that_never_has_the_workers_is_told_of_in_one_sentence(job: Path, mode: str, cpus: int) -> None:
    with pytest.raises(UserError, match=r"^scaling: \d workers want \d+ CPUs, this cluster has 4; lower .+$"):
        trained(job, f"scaling.mode={mode}", segments(("0%", 4)), f"scaling.cpus_per_worker={cpus}")


OVERRIDDEN = [
    (QuietTorchTrainer, "_create_default_callbacks", "(self)"),
    (QuietTorchTrainer, "_initialize_and_run_controller", "(self, **controller_init_kwargs)"),
    (QuietController, "_start", "(self)"),
    (QuietController, "worker_group_cls", None),
    (MistakesEndRuns, "make_decision", "(self, training_failed_error)"),
    (QuietWorkerGroup, "_start", "(self)"),
    (QuietWorkerGroup, "_start_impl", "(self, worker_group_state_builder)"),
    (QuietWorkerGroup, "_get_worker_runtime_env", "(custom_runtime_env)"),
    (QuietWorkerGroup, "_init_train_context_on_workers", "(self, workers, sync_actor, train_context_args)"),
    (AlonePolicy, "_send_resource_request", "(self)"),
    (AlonePolicy, "_maybe_send_resource_request", "(self)"),
    (AlonePolicy, "_cancel_resource_request", "(self)"),
    (PlanTrainer, "_initialize_and_run_controller", "(self, **controller_init_kwargs)"),
    (PlanController, "_make_and_handle_scaling_decision_for_non_running_worker_group", "(self, controller_state)"),
    (PlanController, "_run_control_loop_iteration", "(self)"),
    (PlanController, "_execute_resize_decision", "(self, decision)"),
    (PlanController, "_shutdown_worker_group", "(self)"),
    (PlanController, "worker_group_cls", None),
    (PlanPolicy, "make_decision_for_non_running_worker_group", "(self)"),
    (
        PlanPolicy,
        "make_decision_for_running_worker_group",
        "(self, worker_group_state, worker_group_status)",
    ),
    (PlanPolicy, "_get_num_workers_for_resource_request", "(self)"),
    (PlanPolicy, "on_controller_start_worker_group", "(self, *, scaling_config, num_workers)"),
    (PlanWorkerGroup, "_start", "(self)"),
    (
        PlanWorkerGroup,
        "_create_workers",
        "(self, num_workers, placement_group, resources_per_worker, placement_group_bundle_indices,"
        " starting_world_rank, world_size, replica_group_size)",
    ),
]
CALLED = [
    (PlanPolicy, "_send_resource_request", "(self)"),
    (PlanPolicy, "_maybe_send_resource_request", "(self)"),
    (PlanPolicy, "_get_resize_decision", "(self, num_workers)"),
    (PlanPolicy, "_autoscaling_coordinator", None),
    (QuietController, "run", "(self)"),
    (QuietController, "get_result", "(self)"),
    (QuietWorkerGroup, "abort", "(self)"),
    (QuietWorkerGroup, "get_workers", "(self)"),
    (QuietWorkerGroup, "get_worker_group_state", "(self)"),
    (QuietWorkerGroup, "_decorate_worker_log_file_paths", "(workers)"),
    (PlanController, "get_state", "(self)"),
    (PlanWorkerGroup, "_clear_state", "(self)"),
    (PlanWorkerGroup, "_assign_worker_ranks", "(workers, starting_world_rank, world_size, replica_group_size)"),
    (PlanWorkerGroup, "execute_single", "(self, rank, fn, *fn_args, **fn_kwargs)"),
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
