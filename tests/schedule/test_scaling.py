"""Workers by stage: what every choice keeps to, and how good it is."""

from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED, plans
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.device import DeviceProfile, Link, ModelSpeed, Point
from tokendrop.schedule.kept_by_step import Stages
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import RouteSchedule
from tokendrop.schedule.scaling import (
    Estimate,
    ScalingObjective,
    choose_sizes,
    estimate,
    legal_sizes,
    pause_s,
    step_s,
    with_workers,
)

SHAPE = MEASURED.speeds[0].shape


@st.composite
def cases(draw: st.DrawFn, *, stages: int = 8) -> tuple[RunPlan, DeviceProfile, ScalingObjective]:
    """Runs of up to 12 micro batches of a second or less; exchanges and resizes from free to far dearer than that."""
    kept = draw(st.lists(st.integers(1, SHAPE.sequence_length), min_size=1, max_size=stages, unique=True))
    starts = [0, *accumulate(draw(st.integers(1, 40)) for _ in kept)]
    micro = draw(st.integers(1, 3))
    batch = BatchSplit(global_batch=micro * draw(st.sampled_from([4, 6, 8, 12])), micro_batch=micro, world_size=1)
    steps = starts.pop()
    rising = Stages(stages=tuple(zip(starts, sorted(kept), strict=True)))
    plan = build_plan(
        steps=steps,
        routes=[RouteSchedule(span=(0, SHAPE.layers - 1), kept=rising)],
        shape=SHAPE,
        batch=batch,
        lr_clock=draw(st.sampled_from(["step", "layer_token"])),
        warmup_steps=0,
        peak_lr=1.0,
        final_lr=0.0,
        decay="linear",
    )
    objective = ScalingObjective(
        min_workers=1, max_workers=draw(st.integers(2, 8)), minimise=draw(st.sampled_from(["cost", "time"]))
    )
    return plan, draw(profiles(plan)), objective


@st.composite
def profiles(draw: st.DrawFn, plan: RunPlan) -> DeviceProfile:
    """Devices on which this plan's model takes a second a sequence at full length, and down to 0.02 at one token."""
    points = (
        Point(kept_length=plan.shape.sequence_length, seconds=1.0),
        Point(kept_length=1, seconds=draw(st.floats(0.02, 1.0))),
    )
    speed = ModelSpeed(model="x", shape=plan.shape, dropped_layers=len(plan.dropped_layers), points=points)
    return replace(
        MEASURED,
        speeds=(speed,),
        between_nodes=Link(bytes_per_s=1e12, latency_s=draw(st.sampled_from([0.0, 0.01, 0.1, 1.0]))),
        devices_per_node=draw(st.integers(1, 4)),
        overlap=draw(st.sampled_from([0.0, 0.5])),
        update_s_per_parameter=draw(st.sampled_from([0.0, 0.2])) / plan.shape.parameters,
        resize_s=draw(st.sampled_from([0.0, 0.5, 5.0, 50.0])),
        checkpoint_bytes_per_s=1e12,
        usd_per_gpu_hour=2.0,
    )


def fixed(plan: RunPlan, profile: DeviceProfile, workers: int) -> Estimate:
    return estimate(with_workers(plan, [(0, workers)]), profile)


def chosen(plan: RunPlan, profile: DeviceProfile, objective: ScalingObjective) -> tuple[RunPlan, Estimate]:
    elastic = with_workers(plan, choose_sizes(plan, profile, objective))
    return elastic, estimate(elastic, profile)


def sums(objective: ScalingObjective, taken: Estimate) -> tuple[float, float]:
    """What is minimised and what is limited, in hours and GPU-hours."""
    both = taken.gpu_hours, taken.wall_clock_s / 3600
    return both if objective.minimise == "cost" else both[::-1]


def halfway(plan: RunPlan, profile: DeviceProfile, objective: ScalingObjective) -> ScalingObjective:
    """The objective with a limit between those of the smallest and of the largest size."""
    options = legal_sizes(plan, objective)
    limits = [sums(objective, fixed(plan, profile, workers))[1] for workers in (options[0], options[-1])]
    return replace(objective, limit=sum(limits) / 2)


@given(cases())
def test_sizes_divide_so_the_global_batch_never_changes(case: tuple[RunPlan, DeviceProfile, ScalingObjective]) -> None:
    plan, profile, objective = case
    objective = halfway(plan, profile, objective)
    elastic, _ = chosen(plan, profile, objective)
    for segment in elastic.segments:
        assert segment.workers * segment.accumulation * plan.batch.micro_batch == plan.batch.global_batch
        assert objective.min_workers <= segment.workers <= objective.max_workers


@given(cases(), st.data())
def test_workers_change_nothing_but_workers(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective], data: st.DataObject
) -> None:
    plan, _, objective = case
    starts = sorted({0, *data.draw(st.lists(st.integers(0, plan.steps - 1), max_size=4))})
    sizes = [(start, data.draw(st.sampled_from(legal_sizes(plan, objective)))) for start in starts]
    elastic = with_workers(plan, sizes)
    for step in range(plan.steps):
        assert elastic.at(step).workers == next(size for start, size in reversed(sizes) if start <= step)
        assert elastic.at(step).kept_length == plan.at(step).kept_length
        assert elastic.lr(step) == plan.lr(step)
        assert (elastic.layer_tokens(step), elastic.flops(step)) == (plan.layer_tokens(step), plan.flops(step))
    workers = [elastic.at(step).workers for step in range(plan.steps)]
    changes = [(step, *pair) for step, pair in enumerate(pairwise(workers), start=1) if pair[0] != pair[1]]
    assert list(elastic.resizes) == changes
    assert all(one.stop == two.start for one, two in pairwise(elastic.segments))


@given(cases(stages=4), st.data())
def test_no_other_choice_is_better_without_a_limit_and_a_limit_is_kept_where_it_can_be(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective], data: st.DataObject
) -> None:
    """The limit is what some choice takes, or less than any does."""
    plan, profile, objective = case
    starts, options = [segment.start for segment in plan.segments], legal_sizes(plan, objective)
    routes = [list(zip(starts, sizes, strict=True)) for sizes in product(options, repeat=len(starts))]
    every = [sums(objective, estimate(with_workers(plan, route), profile)) for route in routes]
    assert sums(objective, chosen(plan, profile, objective)[1])[0] == pytest.approx(min(value for value, _ in every))
    least = min(limited for _, limited in every)
    limit = data.draw(st.sampled_from([least * 0.9, *sorted({limited for _, limited in every})]))
    objective = replace(objective, limit=limit)

    if least <= limit:
        assert sums(objective, chosen(plan, profile, objective)[1])[1] <= limit * (1 + 1e-8)
    else:
        with pytest.raises(ValueError, match="at least") as caught:
            choose_sizes(plan, profile, objective)
        assert float(str(caught.value).split(" takes ")[1].split()[0]) >= least


@given(cases(stages=3), st.sampled_from([0.0, 10.0, 3600.0]), st.integers(1, 50))
def test_the_choice_takes_in_what_losses_are_expected_to_cost(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective], rate: float, every: int
) -> None:
    plan, profile, objective = case
    profile = replace(profile, node_losses_per_hour=rate, node_start_s=2.0)
    objective = replace(objective, checkpoint_steps=every)
    starts, options = [segment.start for segment in plan.segments], legal_sizes(plan, objective)
    every_plan = [
        with_workers(plan, list(zip(starts, sizes, strict=True))) for sizes in product(options, repeat=len(starts))
    ]
    best = min(sums(objective, estimate(one, profile, every))[0] for one in every_plan)
    elastic = with_workers(plan, choose_sizes(plan, profile, objective))
    assert sums(objective, estimate(elastic, profile, every))[0] == pytest.approx(best)


@given(cases(), st.integers(1, 50))
def test_without_losses_or_checkpoints_to_go_back_to_no_number_changes(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective], every: int
) -> None:
    """Nor its last bit."""
    plan, profile, objective = case
    objective = halfway(plan, profile, objective)
    spot = replace(profile, node_losses_per_hour=0.5)
    sizes = choose_sizes(plan, profile, objective)
    assert choose_sizes(plan, profile, replace(objective, checkpoint_steps=every)) == sizes
    assert choose_sizes(plan, spot, objective) == sizes
    elastic = with_workers(plan, sizes)
    assert estimate(elastic, profile, every) == estimate(elastic, profile) == estimate(elastic, spot)
    steps = [(s.workers, (s.stop - s.start) * step_s(plan, profile, s, s.workers)) for s in elastic.segments]
    steps += [(max(one, two), pause_s(plan, profile, one, two)) for _, one, two in elastic.resizes]
    assert estimate(elastic, profile, every).wall_clock_s == sum(seconds for _, seconds in steps)
    assert estimate(elastic, profile, every).gpu_hours == sum(workers * seconds for workers, seconds in steps) / 3600


@given(cases(), st.integers(1, 50))
def test_rare_losses_cost_in_proportion_to_their_rate_and_frequent_ones_more(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective], every: int
) -> None:
    plan, profile, objective = case
    elastic, none = chosen(plan, profile, objective)

    def lost(rate: float) -> tuple[float, float]:
        found = estimate(elastic, replace(profile, node_losses_per_hour=rate, node_start_s=9.0), every)
        return found.wall_clock_s - none.wall_clock_s, found.gpu_hours - none.gpu_hours

    rare, twice, some, more = (lost(rate) for rate in (1e-3, 2e-3, 10.0, 20.0))
    assert rare[0] > 0
    assert twice == pytest.approx((2 * rare[0], 2 * rare[1]), rel=0.01)
    assert more[0] >= 2 * some[0] * (1 - 1e-6)
    assert more[1] >= 2 * some[1] * (1 - 1e-6)


@given(cases())
def test_within_the_time_of_a_fixed_size_it_never_costs_more(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective],
) -> None:
    plan, profile, objective = case
    for workers in legal_sizes(plan, objective):
        value, limit = sums(objective, fixed(plan, profile, workers))
        found, limited = sums(objective, chosen(plan, profile, replace(objective, limit=limit))[1])
        assert found <= value * (1 + 1e-8)
        assert limited <= limit * (1 + 1e-8)


@given(cases())
def test_where_resizes_are_free_each_stage_has_its_own_best_size(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective],
) -> None:
    plan, profile, objective = case
    at_once = Link(bytes_per_s=1e18, latency_s=0.0)  # by which a checkpoint that was read is handed on
    links = {"within_node": at_once, "between_nodes": at_once}
    profile = replace(profile, resize_s=0.0, checkpoint_bytes_per_s=1e18, **links)
    _, taken = chosen(plan, profile, objective)
    stages = [[fixed(part, profile, w) for w in legal_sizes(plan, objective)] for part in alone(plan)]
    best = sum(min(sums(objective, one)[0] for one in stage) for stage in stages)
    assert sums(objective, taken)[0] == pytest.approx(best)


def alone(plan: RunPlan) -> list[RunPlan]:
    """Each stage as a run of its own."""
    return [replace(plan, segments=(replace(s, start=0, stop=s.stop - s.start),)) for s in plan.segments]


@given(cases())
def test_dearer_resizes_never_cost_less(case: tuple[RunPlan, DeviceProfile, ScalingObjective]) -> None:
    plan, profile, objective = case
    one, two = (chosen(plan, replace(profile, resize_s=pause), objective) for pause in (1.0, 100.0))
    assert sums(objective, one[1])[0] <= sums(objective, two[1])[0] * (1 + 1e-8)
    objective = halfway(plan, profile, objective)
    assert chosen(plan, replace(profile, resize_s=1e9), objective)[0].resizes == ()


@given(cases())
def test_neighbours_of_one_size_are_one_part(case: tuple[RunPlan, DeviceProfile, ScalingObjective]) -> None:
    plan, profile, objective = case
    objective = halfway(plan, profile, objective)
    sizes = choose_sizes(plan, profile, objective)
    assert all(one[1] != two[1] for one, two in pairwise(sizes))
    assert len(with_workers(plan, sizes).resizes) == len(sizes) - 1 < len(plan.segments)


@given(cases())
def test_gpu_hours_are_workers_by_time_and_a_pause_is_paid_on_the_larger_side(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective],
) -> None:
    plan, profile, objective = case
    objective = halfway(plan, profile, objective)
    elastic, taken = chosen(plan, profile, objective)
    running = [fixed(part, profile, part.at(0).workers) for part in alone(elastic)]
    changes = [(before, after) for _, before, after in elastic.resizes]
    pauses = [profile.pause_s(plan.shape, before=before, after=after) for before, after in changes]
    waiting = sum(max(change) * pause for change, pause in zip(changes, pauses, strict=True))
    assert taken.wall_clock_s == pytest.approx(sum(r.wall_clock_s for r in running) + sum(pauses))
    assert taken.gpu_hours == pytest.approx(sum(r.gpu_hours for r in running) + waiting / 3600)
    assert taken.cost == pytest.approx(2 * taken.gpu_hours)


@given(plans(drops=False))
def test_sizes_that_do_not_start_at_0_or_do_not_rise_are_refused(plan: RunPlan) -> None:
    for sizes in ([], [(1, 1)], [(0, 1), (0, 1)], [(0, 1), (plan.steps, 1)]):
        with pytest.raises(ValueError, match="first steps that rise from 0"):
            with_workers(plan, sizes)


@given(cases(), st.integers(1, 10**6), st.sampled_from([None, 1.3]))
def test_a_limit_that_is_advised_can_be_kept(
    case: tuple[RunPlan, DeviceProfile, ScalingObjective], slower: int, price: float | None
) -> None:
    """Whatever the number of its digits; said in the unit in which it was given."""
    plan, profile, objective = case
    profile = replace(profile, resize_s=profile.resize_s * slower, node_losses_per_hour=min(3600.0, slower / 100))
    objective = replace(objective, minimise="time", limit=1e-9, usd_per_gpu_hour=price, checkpoint_steps=10)
    with pytest.raises(ValueError, match="can't be kept") as caught:
        choose_sizes(plan, profile, objective)
    assert str(caught.value).startswith("budget_gpu_hours=1e-09" if price is None else "budget_usd=1.3e-09")
    advised = float(str(caught.value).split(" takes ")[1].split()[0])
    assert choose_sizes(plan, profile, replace(objective, limit=advised / (price or 1)))
