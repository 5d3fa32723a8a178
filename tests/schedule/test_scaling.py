"""Workers by stage: what every choice keeps to, and that none is better."""

from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED, plans
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.device import DeviceProfile, Link, ModelSpeed, Point
from tokendrop.schedule.kept_length import Piecewise
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.scaling import Estimate, Wish, choose_sizes, estimate, legal_sizes, with_workers

SHAPE = MEASURED.speeds[0].shape


@st.composite
def cases(draw: st.DrawFn, *, stages: int = 8) -> tuple[RunPlan, DeviceProfile, Wish]:
    """Runs of up to 12 micro batches of a second or less; exchanges and resizes from free to far dearer than that."""
    kept = draw(st.lists(st.integers(1, SHAPE.sequence_length), min_size=1, max_size=stages, unique=True))
    starts = [0, *accumulate(draw(st.integers(1, 40)) for _ in kept)]
    micro = draw(st.integers(1, 3))
    batch = BatchSplit(global_batch=micro * draw(st.sampled_from([4, 6, 8, 12])), micro_batch=micro, world_size=1)
    plan = build_plan(
        steps=starts.pop(),
        schedule=Piecewise(stages=tuple(zip(starts, sorted(kept), strict=True))),
        shape=SHAPE,
        dropped_layers=tuple(range(SHAPE.layers)),
        batch=batch,
        lr_clock=draw(st.sampled_from(["step", "layer_token"])),
        warmup_steps=0,
        peak_lr=1.0,
        final_lr=0.0,
        decay="linear",
    )
    wish = Wish(min_workers=1, max_workers=draw(st.integers(2, 8)), minimise=draw(st.sampled_from(["cost", "time"])))
    return plan, draw(profiles(plan)), wish


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


def chosen(plan: RunPlan, profile: DeviceProfile, wish: Wish) -> tuple[RunPlan, Estimate]:
    elastic = with_workers(plan, choose_sizes(plan, profile, wish))
    return elastic, estimate(elastic, profile)


def sums(wish: Wish, taken: Estimate) -> tuple[float, float]:
    """What is minimised and what is limited, in hours and GPU-hours."""
    both = taken.gpu_hours, taken.wall_clock_s / 3600
    return both if wish.minimise == "cost" else both[::-1]


def halfway(plan: RunPlan, profile: DeviceProfile, wish: Wish) -> Wish:
    """The wish with a limit between those of the smallest and of the largest size."""
    options = legal_sizes(plan, wish)
    limits = [sums(wish, fixed(plan, profile, workers))[1] for workers in (options[0], options[-1])]
    return replace(wish, limit=sum(limits) / 2)


@given(cases())
def test_sizes_divide_so_the_global_batch_never_changes(case: tuple[RunPlan, DeviceProfile, Wish]) -> None:
    plan, profile, wish = case
    wish = halfway(plan, profile, wish)
    elastic, _ = chosen(plan, profile, wish)
    for segment in elastic.segments:
        assert segment.workers * segment.accumulation * plan.batch.micro_batch == plan.batch.global_batch
        assert wish.min_workers <= segment.workers <= wish.max_workers


@given(cases(), st.data())
def test_workers_change_nothing_but_workers(case: tuple[RunPlan, DeviceProfile, Wish], data: st.DataObject) -> None:
    plan, _, wish = case
    starts = sorted({0, *data.draw(st.lists(st.integers(0, plan.steps - 1), max_size=4))})
    sizes = [(start, data.draw(st.sampled_from(legal_sizes(plan, wish)))) for start in starts]
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
def test_no_other_choice_is_better(case: tuple[RunPlan, DeviceProfile, Wish], data: st.DataObject) -> None:
    """The limit is what some choice takes, or less than any does."""
    plan, profile, wish = case
    starts, options = [segment.start for segment in plan.segments], legal_sizes(plan, wish)
    routes = [list(zip(starts, sizes, strict=True)) for sizes in product(options, repeat=len(starts))]
    every = [sums(wish, estimate(with_workers(plan, route), profile)) for route in routes]
    least = min(limited for _, limited in every)
    limit = data.draw(st.sampled_from([least * 0.9, *sorted({limited for _, limited in every})]))
    within = [value for value, limited in every if limited <= limit]
    wish = replace(wish, limit=limit)

    if within:
        value, limited = sums(wish, chosen(plan, profile, wish)[1])
        assert value <= min(within) * (1 + 1e-8)  # below it where rounding alone has put a better one over the limit
        assert limited <= limit * (1 + 1e-8)
    else:
        with pytest.raises(ValueError, match="at least") as caught:
            choose_sizes(plan, profile, wish)
        assert float(str(caught.value).split(" takes ")[1].split()[0]) >= least


@given(cases())
def test_within_the_time_of_a_fixed_size_it_never_costs_more(case: tuple[RunPlan, DeviceProfile, Wish]) -> None:
    plan, profile, wish = case
    for workers in legal_sizes(plan, wish):
        value, limit = sums(wish, fixed(plan, profile, workers))
        found, limited = sums(wish, chosen(plan, profile, replace(wish, limit=limit))[1])
        assert found <= value * (1 + 1e-8)
        assert limited <= limit * (1 + 1e-8)


@given(cases())
def test_where_resizes_are_free_each_stage_has_its_own_best_size(case: tuple[RunPlan, DeviceProfile, Wish]) -> None:
    plan, profile, wish = case
    at_once = Link(bytes_per_s=1e18, latency_s=0.0)  # by which a checkpoint that was read is handed on
    links = {"within_node": at_once, "between_nodes": at_once}
    profile = replace(profile, resize_s=0.0, checkpoint_bytes_per_s=1e18, **links)
    _, taken = chosen(plan, profile, wish)
    stages = [[fixed(part, profile, w) for w in legal_sizes(plan, wish)] for part in alone(plan)]
    best = sum(min(sums(wish, one)[0] for one in stage) for stage in stages)
    assert sums(wish, taken)[0] == pytest.approx(best)


def alone(plan: RunPlan) -> list[RunPlan]:
    """Each stage as a run of its own."""
    return [replace(plan, segments=(replace(s, start=0, stop=s.stop - s.start),)) for s in plan.segments]


@given(cases())
def test_dearer_resizes_never_cost_less(case: tuple[RunPlan, DeviceProfile, Wish]) -> None:
    plan, profile, wish = case
    wish = halfway(plan, profile, wish)
    one, two = (chosen(plan, replace(profile, resize_s=pause), wish) for pause in (1.0, 100.0))
    assert sums(wish, one[1])[0] <= sums(wish, two[1])[0] * (1 + 1e-8)
    assert chosen(plan, replace(profile, resize_s=1e9), wish)[0].resizes == ()


@given(cases())
def test_neighbours_of_one_size_are_one_part(case: tuple[RunPlan, DeviceProfile, Wish]) -> None:
    plan, profile, wish = case
    wish = halfway(plan, profile, wish)
    sizes = choose_sizes(plan, profile, wish)
    assert all(one[1] != two[1] for one, two in pairwise(sizes))
    assert len(with_workers(plan, sizes).resizes) == len(sizes) - 1 < len(plan.segments)


@given(cases())
def test_gpu_hours_are_workers_by_time_and_a_pause_is_paid_on_the_larger_side(
    case: tuple[RunPlan, DeviceProfile, Wish],
) -> None:
    plan, profile, wish = case
    wish = halfway(plan, profile, wish)
    elastic, taken = chosen(plan, profile, wish)
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
