"""The time left of a run is that of its plan, as fast as the run has proved to be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED, plans
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan, Segment
from tokendrop.schedule.scaling import ScalingObjective, legal_sizes, pause_s, step_s, with_workers
from tokendrop.schedule.time_left import TimeLeft


@st.composite
def elastic_plans(draw: st.DrawFn) -> RunPlan:
    """Plans whose workers change now and then."""
    plan = draw(plans())
    starts = sorted(draw(st.sets(st.integers(0, plan.steps - 1), max_size=4)) | {0})
    sizes = legal_sizes(plan, ScalingObjective(min_workers=1, max_workers=8, minimise="time"))
    return with_workers(plan, [(start, draw(st.sampled_from(sizes))) for start in starts])


def seconds_of(plan: RunPlan, profile: DeviceProfile | None, segment: Segment, factor: float) -> float:
    """Of a step, where a run is as its profile says, or its FLOPs take it."""
    if profile is not None:
        return factor * step_s(plan, profile, segment, segment.workers)
    return factor * segment.flops_per_step / segment.workers


@given(elastic_plans(), st.sampled_from([None, MEASURED]), st.floats(1e-9, 10), st.data())
def test_it_is_the_sum_of_the_steps_to_come(
    plan: RunPlan, profile: DeviceProfile | None, factor: float, data: st.DataObject
) -> None:
    done = data.draw(st.integers(1, plan.steps))
    stop = data.draw(st.integers(done, plan.steps))
    left = TimeLeft(plan, profile)
    for step in range(max(0, done - 5), done):
        segment = plan.at(step)
        left.take(step + 1, step_time_s=seconds_of(plan, profile, segment, factor), workers=segment.workers)
    steps = sum(seconds_of(plan, profile, plan.at(step), factor) for step in range(done, stop))
    resizes = [(before, after) for start, before, after in plan.resizes if done <= start < stop]
    pauses = sum(pause_s(plan, profile, before, after) for before, after in resizes) if profile else 0.0
    assert left.until(stop, done=done) == pytest.approx(steps + pauses)


@given(elastic_plans())
def test_a_step_of_other_micro_batches_counts_as_one_of_the_plans_workers(plan: RunPlan) -> None:
    """A run may go on with another micro batch, and its record has steps of workers that don't share it."""
    odd = plan.batch.global_batch // plan.batch.micro_batch + 1
    left, planned = TimeLeft(plan, MEASURED), TimeLeft(plan, MEASURED)
    left.take(1, step_time_s=2.0, workers=odd * plan.batch.group)
    planned.take(1, step_time_s=2.0, workers=plan.at(0).workers)
    assert left.until(plan.steps, done=1) == planned.until(plan.steps, done=1)


@given(elastic_plans(), st.data())
def test_pauses_take_what_pauses_took(plan: RunPlan, data: st.DataObject) -> None:
    done = data.draw(st.integers(1, plan.steps))
    left, without = TimeLeft(plan), TimeLeft(plan)
    for one in (left, without):
        one.take(done, step_time_s=1.0, workers=plan.at(done - 1).workers)
    for seconds in (10.0, 20.0):
        left.take_pause(seconds)
    more = sum(done <= start < plan.steps for start, _, _ in plan.resizes) * 15.0
    assert left.until(plan.steps, done=done) == pytest.approx(without.until(plan.steps, done=done) + more)


@given(plans())
def test_it_is_not_known_before_the_first_step(plan: RunPlan) -> None:
    assert TimeLeft(plan).until(plan.steps, done=0) is None
    assert TimeLeft(plan).step_s(0, workers=1) is None


@given(plans(), st.floats(0.01, 100))
def test_the_first_step_which_warms_up_does_not_count(plan: RunPlan, slow: float) -> None:
    plan = with_workers(replace(plan), [(0, 1)])
    if plan.steps < 3:
        return
    left, known = TimeLeft(plan), TimeLeft(plan)
    left.take(1, step_time_s=slow, workers=1)
    for one in (left, known):
        one.take(2, step_time_s=1.0, workers=1)
    assert left.until(plan.steps, done=2) == known.until(plan.steps, done=2)
