"""What the plan charges for traffic and resizes: laws of sizes, and sums over steps."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED, plans
from tokendrop.config.run import ScalingConfig
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import estimate, expected_course, pause_s, step_s, stretches_s, with_workers
from tokendrop.schedule.traffic import Sharding, traffic

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
SHAPE = MEASURED.speeds[0].shape
ONE_MORE = 1 + 1e-12

shardings = st.sampled_from(SHARDINGS)
workers = st.integers(1, 12)
profiles = st.builds(
    lambda overlap, storage: replace(
        MEASURED, overlap=overlap, checkpoint_bytes_per_s=storage, restore_bytes_per_s=1e7
    ),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1e6, 1e9]),
)
grown = st.sampled_from(["layers", "width", "vocab_size", "mlp_width"])


def seconds(profile: DeviceProfile, shape: ModelShape, sharding: Sharding, *, size: int, each: int = 1) -> float:
    batch = BatchSplit(global_batch=size * each, micro_batch=1, world_size=size)
    flops = shape.flops(kept=shape.sequence_length, dropped_layers=4)
    return profile.step_s(shape, flops=flops, batch=batch, sharding=sharding)


@given(profiles, shardings, workers, st.integers(1, 4), grown)
def test_larger_models_and_more_workers_never_take_less_time(
    profile: DeviceProfile, sharding: Sharding, size: int, each: int, key: str
) -> None:
    larger = replace(SHAPE, **{key: getattr(SHAPE, key) + 8})
    now = seconds(profile, SHAPE, sharding, size=size, each=each)
    assert now <= seconds(profile, larger, sharding, size=size, each=each) * ONE_MORE
    assert now <= seconds(profile, SHAPE, sharding, size=size + 1, each=each) * ONE_MORE
    assert now <= seconds(profile, SHAPE, sharding, size=size, each=each + 1) * ONE_MORE
    assert now >= seconds(replace(profile, overlap=1.0), SHAPE, sharding, size=size, each=each) / ONE_MORE


@given(profiles, shardings, workers, workers, grown)
def test_a_larger_model_and_slower_storage_never_resize_sooner(
    profile: DeviceProfile, sharding: Sharding, before: int, after: int, key: str
) -> None:
    larger = replace(SHAPE, **{key: getattr(SHAPE, key) + 8})
    change = {"before": before, "after": after, "sharding": sharding}
    now = profile.pause_s(SHAPE, **change)
    assert now < profile.pause_s(larger, **change)
    assert now < replace(profile, resize_s=profile.resize_s + 1).pause_s(SHAPE, **change)
    assert now < replace(profile, restore_bytes_per_s=1e6).pause_s(SHAPE, **change)
    if sharding == "ddp":  # everything goes to everybody, so to more of them no sooner
        assert now <= profile.pause_s(SHAPE, before=before, after=after + 1) * ONE_MORE
    else:
        assert now <= profile.pause_s(SHAPE, before=before, after=after) * ONE_MORE


@given(shardings, st.integers(1, 9))
def test_a_steps_traffic_is_that_of_its_micro_batches(sharding: Sharding, accumulation: int) -> None:
    sent = traffic(SHAPE, sharding)
    total = sum(sent.forward.bytes + sent.backward.bytes for _ in range(accumulation))
    assert sent.of_step(accumulation).bytes == total + sent.last_backward.bytes + sent.update.bytes
    assert MEASURED.exchange_s(sent.of_step(accumulation), 1) == 0


@given(shardings, st.integers(2, 12), st.integers(1, 4))
def test_without_overlap_a_step_takes_its_computation_and_all_of_its_traffic(
    sharding: Sharding, size: int, each: int
) -> None:
    alone = seconds(MEASURED, SHAPE, sharding, size=1, each=each)
    exchange = MEASURED.exchange_s(traffic(SHAPE, sharding).of_step(each), size)
    assert seconds(MEASURED, SHAPE, sharding, size=size, each=each) == pytest.approx(alone + exchange)


@given(st.integers(2, 12), st.integers(2, 6))
def test_what_is_shared_out_is_gathered_for_every_micro_batch(size: int, each: int) -> None:
    costs = {sharding: seconds(MEASURED, SHAPE, sharding, size=size, each=each) for sharding in SHARDINGS}
    assert costs["ddp"] < costs["zero_1"] < costs["zero_2"]
    assert costs["ddp"] < costs["zero_3"] < costs["fsdp"]


@given(plans(), profiles, shardings, st.data())
def test_an_estimate_is_the_sum_over_its_steps_and_changes_of_workers(
    plan: RunPlan, profile: DeviceProfile, sharding: Sharding, data: st.DataObject
) -> None:
    micro_batches = plan.batch.global_batch // plan.batch.micro_batch
    sizes = st.sampled_from([size for size in range(1, micro_batches + 1) if micro_batches % size == 0])
    starts = sorted({0, *data.draw(st.lists(st.integers(0, plan.steps - 1), max_size=3))})
    plan = replace(with_workers(plan, [(start, data.draw(sizes)) for start in starts]), sharding=sharding)

    steps = [
        (plan.at(step).workers, step_s(plan, profile, plan.at(step), plan.at(step).workers))
        for step in range(plan.steps)
    ]
    pauses = [
        (
            max(plan.at(step - 1).workers, plan.at(step).workers),
            pause_s(plan, profile, plan.at(step - 1).workers, plan.at(step).workers),
        )
        for step in range(1, plan.steps)
    ]

    taken = estimate(plan, profile)
    assert taken.wall_clock_s == pytest.approx(sum(s for _, s in steps + pauses))
    assert taken.gpu_hours == pytest.approx(sum(held * s for held, s in steps + pauses) / 3600)
    assert sum(stretches_s(plan, profile)) == pytest.approx(sum(s for _, s in steps))
    assert len(stretches_s(plan, profile)) == len(plan.resizes) + 1
    whole = expected_course(plan, profile)[-1].at(plan.steps)
    assert (whole.wall_clock_s, whole.worker_s / 3600) == pytest.approx((taken.wall_clock_s, taken.gpu_hours))


@given(plans(), st.floats(0, 1e4))
def test_nodes_are_asked_for_as_long_ahead_as_they_take_to_come(plan: RunPlan, node_start_s: float) -> None:
    known = replace(MEASURED, node_start_s=node_start_s)
    assert ScalingConfig(profile=known).lead(plan) == node_start_s
    assert ScalingConfig(profile=known, lead_s=7.0).lead(plan) == 7.0
    shortest = min(stretches_s(plan, MEASURED))
    assert ScalingConfig(profile=MEASURED).lead(plan) == pytest.approx(min(180, shortest / 10))
    assert ScalingConfig().lead(plan) == 30.0
