"""What following a plan takes does not grow with the workers faster than they do, and decisions do not depend on it."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.train
from hypothesis import given
from hypothesis import strategies as st

from tiny import experiment
from tokendrop.bench.fake_workers import FakeCluster
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.elastic.control import RunControl
from tokendrop.elastic.decide import ClusterView, ScalingAction, ScalingDecider
from tokendrop.schedule.scaling import with_workers
from tokendrop.track.decisions import DecidedJob
from tokendrop.track.journal import Journal
from tokendrop.train.report import StepReport

SIZES, STEPS = (1, 2, 4, 8), 40


def decider_of(sizes: list[tuple[int, int]], times: int) -> ScalingDecider:
    """Of a plan whose workers are so many times those of `sizes`, each with its first step."""
    config = experiment(train__length=f"{STEPS} steps", train__micro_batch=1, train__global_batch=SIZES[-1] * times)
    plan = with_workers(config.plan, [(start, workers * times) for start, workers in sizes])
    return ScalingDecider(plan=plan, sizes=tuple(size * times for size in SIZES), lead_s=6.0, patience_s=5.0)


views = st.builds(
    ClusterView,
    now=st.floats(0, 60),
    have=st.sampled_from(SIZES),
    since=st.just(0.0),
    done=st.integers(0, STEPS),
    possible=st.integers(0, 12),
    waits=st.booleans(),
    step_time_s=st.sampled_from([0.0, 0.5, 10.0]),
    leaving=st.sampled_from([frozenset[str](), frozenset({"node"})]),
)
plans = st.sets(st.integers(1, STEPS - 1), max_size=4).flatmap(
    lambda starts: st.tuples(*(st.tuples(st.just(start), st.sampled_from(SIZES)) for start in sorted({0, *starts})))
)


@given(plans, st.lists(st.tuples(views, st.floats(0, 0.999)), min_size=1, max_size=12), st.sampled_from([3, 128]))
def test_so_many_times_the_workers_on_so_many_times_the_places_are_decided_alike(
    plan: list[tuple[int, int]], looks: list[tuple[ClusterView, float]], times: int
) -> None:
    """A cluster has room for some workers more where these do not make up a whole one of the smaller cluster."""
    few, many = decider_of(plan, 1), decider_of(plan, times)
    for view, rest in sorted(looks, key=lambda look: look[0].now):
        more = replace(view, have=view.have * times, possible=int((view.possible + rest) * times))
        assert many.request(more) == few.request(view) * times
        assert many.next_size(more, pauses=view.waits) == few.next_size(view, pauses=view.waits) * times
        decided, of_many = few.decide(view), many.decide(more)
        assert of_many == (decided if isinstance(decided, ScalingAction) else decided * times)
        start = few.start(min(view.done, STEPS - 1), possible=view.possible, waited_s=view.now, is_restart=view.waits)
        assert start * times == many.start(
            min(view.done, STEPS - 1), possible=more.possible, waited_s=view.now, is_restart=view.waits
        )


class Counted:
    """Files opened and functions called by this thread while a block runs."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._counts = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: Any) -> None:
        if self._counts and event in ("open", "os.listdir", "os.scandir"):
            self.calls["files"] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        def called(frame: Any, event: str, argument: Any) -> None:
            self.calls["functions"] += event in ("call", "c_call")

        self._counts = True
        sys.setprofile(called)
        yield
        sys.setprofile(None)
        self._counts = False


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted()


def job_of(workers: int) -> ExperimentConfig:
    turns = [{"from": "0%", "workers": workers // 2}, {"from": "50%", "workers": workers}]
    return experiment(
        train__length=f"{STEPS} steps",
        train__micro_batch=1,
        train__global_batch=workers,
        scaling={"mode": "schedule", "segments": turns},
    )


def polls(folder: Path, workers: int, counted: Counted) -> Counter[str]:
    """The most that a poll asks of Ray and of files, and the functions that it calls, as nodes leave and are taken."""
    config, cluster = job_of(workers), FakeCluster.of(workers)
    folder.mkdir()
    RunControl(folder).reset()
    sizes = tuple(size for size in range(1, workers + 1) if workers % size == 0)
    decider = ScalingDecider(plan=config.plan, sizes=sizes, lead_s=1000.0, patience_s=0.0)
    scaling: Any = ray.train.ScalingConfig(num_workers=(1, workers), resources_per_worker={"CPU": 8})
    most: Counter[str] = Counter()
    with cluster.policy(scaling, DecidedJob(config, folder), decider) as policy:
        group = cluster.group(workers // 2)
        journal = Journal(folder, rank=0, world_size=workers // 2, start=0)
        for step in range(1, 13):
            journal.record(report(step, workers // 2), [])
            journal._flush()
            cluster.leaving = frozenset(cluster.nodes[:1] if step in (4, 5) else ())
            cluster.taken = frozenset(cluster.nodes[1::2] if step in (7, 8) else ())
            counted.calls, cluster.calls = Counter(), Counter()
            with counted.counting():
                policy.make_decision_for_running_worker_group(group, None)
            most |= counted.calls + Counter({f"ray {name}": calls for name, calls in cluster.calls.items()})
    return most


def report(step: int, workers: int) -> StepReport:
    numbers = dict.fromkeys(("loss", "grad_norm", "lr", "flops", "data_time_s", "step_time_s"), 1.0)
    counts = dict.fromkeys(("kept_length", "tokens", "layer_tokens"), 1)
    return StepReport(step=step, world_size=workers, val_loss=None, **numbers, **counts)


def test_a_poll_asks_ray_and_files_as_often_for_very_many_workers_and_looks_at_each_a_few_times(
    tmp_path: Path, counted: Counted
) -> None:
    few, some, many = (polls(tmp_path / f"{workers}", workers, counted) for workers in (16, 256, 1024))
    asked = {name: calls for name, calls in few.items() if name != "functions"}
    assert {name.split()[0] for name in asked} == {"files", "ray"}
    assert asked == {name: calls for name, calls in many.items() if name != "functions"}
    assert sum(asked.values()) <= 16
    each = (some["functions"] - few["functions"]) / (256 - 16)
    assert many["functions"] <= some["functions"] + 1.2 * each * (1024 - 256)
