"""Step times by a device profile, and the shipped profiles against what they were derived from."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED, batch_splits
from tokendrop.config.files import profile_mapping
from tokendrop.config.load import build, load_job
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.device import DeviceProfile, ModelSpeed, Point, interpolate
from tokendrop.schedule.kept_length import Constant
from tokendrop.schedule.plan import build_plan
from tokendrop.schedule.routes import RouteSchedule
from tokendrop.schedule.scaling import estimate
from tokendrop.schedule.traffic import traffic

PAPER = Path(__file__).parents[2] / "jobs" / "paper"
SHIPPED = {"a100-40g-8": "arXiv:2211.11586", "h200-8": "modded-nanogpt README"}  # and what each must cite
SHAPE = MEASURED.speeds[0].shape
SECONDS = {(p.kept_length, p.micro_batch): p.seconds for p in MEASURED.speeds[0].points}


def step_s(profile: DeviceProfile, kept: int = 64, *, micro: int = 1, workers: int = 1, each: int = 1) -> float:
    batch = BatchSplit(global_batch=micro * workers * each, micro_batch=micro, world_size=workers)
    return profile.step_s(SHAPE, flops=SHAPE.flops(kept=kept, dropped_layers=4), batch=batch)


def all_reduce_s(profile: DeviceProfile, workers: int) -> float:
    return profile.exchange_s(traffic(SHAPE, "ddp").of_step(1), workers)


@pytest.mark.parametrize(("kept", "micro"), SECONDS)
def test_what_was_measured_is_predicted(kept: int, micro: int) -> None:
    assert step_s(MEASURED, kept, micro=micro) == pytest.approx(SECONDS[kept, micro])


@given(st.integers(1, 64), st.integers(1, 6))
def test_more_kept_tokens_never_take_less_time(kept: int, micro: int) -> None:
    assert step_s(MEASURED, kept, micro=micro) <= step_s(MEASURED, min(64, kept + 1), micro=micro) * (1 + 1e-12)


@given(batch_splits(), st.integers(1, 64))
def test_a_step_is_its_micro_batches_then_the_exchange_then_the_update(batch: BatchSplit, kept: int) -> None:
    profile = replace(MEASURED, update_s_per_parameter=1e-9)
    micro_s = step_s(MEASURED, kept, micro=batch.micro_batch)
    whole_s = batch.accumulation * micro_s + SHAPE.parameters * 1e-9
    whole_s += all_reduce_s(profile, batch.world_size)
    assert profile.step_s(SHAPE, flops=SHAPE.flops(kept=kept, dropped_layers=4), batch=batch) == pytest.approx(whole_s)


def test_an_exchange_hides_behind_the_backward_pass_as_far_as_it_overlaps() -> None:
    exchange_s = all_reduce_s(MEASURED, 8)
    assert 0 < exchange_s < 2 / 3 * 0.5
    assert step_s(MEASURED, workers=8) == pytest.approx(0.5 + exchange_s)
    assert step_s(replace(MEASURED, overlap=1.0), workers=8) == pytest.approx(0.5)


@given(st.integers(1, 12), st.floats(1, 4))
def test_computing_slows_down_as_a_node_fills_and_traffic_does_not(workers: int, slowdown: float) -> None:
    """The node has four devices."""
    profile = replace(MEASURED, update_s_per_parameter=1e-9)
    alone = step_s(profile)
    expected = alone * (1 + (slowdown - 1) * min(workers - 1, 3) / 3) + all_reduce_s(profile, workers)
    assert step_s(replace(profile, full_node_slowdown=slowdown), workers=workers) == pytest.approx(expected)
    assert step_s(replace(profile, full_node_slowdown=slowdown)) == alone
    single = replace(profile, devices_per_node=1)
    assert step_s(replace(single, full_node_slowdown=slowdown), workers=workers) == step_s(single, workers=workers)


def test_one_worker_exchanges_nothing_and_a_second_node_costs_its_link() -> None:
    size = SHAPE.parameters * 4
    assert all_reduce_s(MEASURED, 1) == 0
    assert all_reduce_s(MEASURED, 2) == pytest.approx(size / 1e9 + 2e-5)
    four, five = (all_reduce_s(MEASURED, workers) for workers in (4, 5))
    assert five - four == pytest.approx(size / 1e8 + 2e-4)


def test_more_flops_than_were_measured_take_time_in_proportion_and_fewer_the_least_time() -> None:
    point = Point(kept_length=32, seconds=0.4)
    profile = replace(MEASURED, speeds=(replace(MEASURED.speeds[0], points=(point,)),))
    ratio = SHAPE.flops(kept=64, dropped_layers=4) / SHAPE.flops(kept=32, dropped_layers=4)
    assert step_s(profile, 64) == pytest.approx(0.4 * ratio)
    assert step_s(profile, 8) == pytest.approx(0.4)


def test_layers_of_different_kept_lengths_take_the_time_of_their_flops() -> None:
    """Between the times of all at the shorter and all at the longer one, by the share of the FLOPs."""

    def seconds(*kept: int) -> float:
        routes = [RouteSchedule(span=(n + 1, n + 1), kept=Constant(kept=k)) for n, k in enumerate(kept)]
        plan = build_plan(
            steps=1,
            routes=routes,
            shape=SHAPE,
            batch=BatchSplit(global_batch=4, micro_batch=1, world_size=1),
            lr_clock="step",
            warmup_steps=0,
            peak_lr=1.0,
            final_lr=0.0,
            decay="linear",
        )
        return estimate(plan, MEASURED).wall_clock_s

    def flops(kept: int) -> int:
        return SHAPE.flops(kept=kept, dropped_layers=4)

    short, middle, long = seconds(16, 16, 16, 16), seconds(16, 48, 48, 64), seconds(64, 64, 64, 64)
    assert (short, long) == pytest.approx((4 * SECONDS[16, 1], 4 * SECONDS[64, 1]))
    share = (flops(16) + 2 * flops(48) + flops(64) - 4 * flops(16)) / (4 * (flops(64) - flops(16)))
    assert (middle - short) / (long - short) == pytest.approx(share)


def test_another_model_runs_at_the_same_flops_per_s() -> None:
    speed = ModelSpeed(model="x", shape=SHAPE, dropped_layers=4, points=(Point(kept_length=64, flops_per_s=1e9),))
    profile = replace(MEASURED, speeds=(speed,))
    wider = replace(SHAPE, width=128, mlp_width=512)
    batch = BatchSplit(global_batch=1, micro_batch=1, world_size=1)
    flops = wider.flops(kept=64, dropped_layers=4)
    assert profile.step_s(wider, flops=flops, batch=batch) == pytest.approx(flops / 1e9)


def test_a_model_between_two_known_ones_is_as_fast_as_something_between_them() -> None:
    shapes = {width: replace(SHAPE, width=width, mlp_width=4 * width) for width in (32, 64, 128)}
    points = {32: Point(kept_length=64, flops_per_s=1e9), 128: Point(kept_length=64, flops_per_s=3e9)}
    speeds = (ModelSpeed(model=f"{w}", shape=shapes[w], dropped_layers=0, points=(p,)) for w, p in points.items())
    profile = replace(MEASURED, speeds=tuple(speeds))
    found = {
        w: profile.flops_per_s(s, flops=s.flops(kept=64, dropped_layers=0), micro_batch=1) for w, s in shapes.items()
    }
    assert found[32] == pytest.approx(1e9)
    assert 1.5e9 < found[64] < 2.5e9
    assert found[128] == pytest.approx(3e9)


@given(st.lists(st.tuples(st.integers(-50, 50).map(float), st.floats(-9, 9)), min_size=1, unique_by=lambda p: p[0]))
def test_interpolation_goes_through_its_points_and_stays_among_their_values(points: list[tuple[float, float]]) -> None:
    values = [value for _, value in points]
    for x, value in points:
        assert interpolate(x, points) == pytest.approx(value)
        assert min(values) - 1e-9 <= interpolate(x + 0.5, points) <= max(values) + 1e-9
    assert interpolate(-99, points) == min(points)[1]
    assert interpolate(99, points) == max(points)[1]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_says_what_it_was_derived_from(name: str) -> None:
    profile = build(DeviceProfile, profile_mapping(name, "profile"), "profile")
    assert (profile.name, profile.kind) == (name, "derived")
    assert SHIPPED[name] in profile.source
    assert profile.usd_per_gpu_hour


@pytest.mark.parametrize(
    ("job", "days"),
    [("gpt3_350m_baseline", 2.59), ("gpt3_350m_ltd", 2.22), ("gpt3_1.3b_baseline", 5.42), ("gpt3_1.3b_ltd", 4.03)],
)
def test_the_papers_runs_on_64_gpus_take_the_papers_days(job: str, days: float) -> None:
    config = load_job(PAPER / f"{job}.yaml", ["scaling.profile=a100-40g-8"])
    assert config.scaling.profile is not None
    taken = estimate(config.plan, config.scaling.profile)
    assert taken.wall_clock_s / 86400 == pytest.approx(days, rel=0.002)
    assert taken.gpu_hours == pytest.approx(64 * taken.wall_clock_s / 3600)


@pytest.mark.parametrize(
    ("shape", "tokens_per_s", "tolerance"),
    [((12, 768), 463_000, 0.001), ((24, 1024), 179_600, 0.001), ((48, 1600), 49_900, 0.001)],
)
def test_the_h200_profile_gives_the_published_speeds_back(
    shape: tuple[int, int], tokens_per_s: float, tolerance: float
) -> None:
    layers, width = shape
    profile = build(DeviceProfile, profile_mapping("h200-8", "profile"), "profile")
    model = ModelShape(
        layers=layers, width=width, sequence_length=1024, vocab_size=50304, mlp_width=4 * width, causal=True
    )
    flops = model.flops(kept=1024, dropped_layers=0)
    speed = profile.flops_per_s(model, flops=flops, micro_batch=8)
    assert 1024 * speed / flops == pytest.approx(tokens_per_s, rel=tolerance)
