"""Times side by side: the points stand for the whole run, and neither the machine nor the order decides."""

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny import TOKENS, experiment, rows_of
from tokendrop.bench import side_by_side
from tokendrop.bench.side_by_side import Point, over_first, time_side_by_side, timed_points, why_not_timed
from tokendrop.bench.step import timed_step
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models.gpt import Gpt
from tokendrop.schedule.plan import RunPlan

SECONDS = st.floats(0.01, 100)
FULL = {"drop__method": "none", "drop__schedule": {"kind": "full"}}


@st.composite
def plans(draw: st.DrawFn) -> RunPlan:
    """Runs whose kept length rises, by any jumps, or stays."""
    starts = draw(st.lists(st.integers(1, 99), max_size=8, unique=True).map(sorted))
    lengths = draw(st.lists(st.integers(1, TOKENS), min_size=len(starts) + 1, max_size=len(starts) + 1).map(sorted))
    stages = [{"at": f"{at} steps", "kept": kept} for at, kept in zip([0, *starts], lengths, strict=True)]
    steps = draw(st.integers(100, 200))
    schedule = {"kind": "piecewise", "stages": stages}
    return experiment(train__length=f"{steps} steps", drop__schedule=schedule).plan


@st.composite
def timings(draw: st.DrawFn) -> tuple[dict[str, list[float]], list[list[Point]]]:
    """Seconds of two or three jobs in some turns, and the points that these are of."""
    turns = draw(st.integers(1, 5))
    points = draw(
        st.lists(st.lists(st.tuples(st.integers(1, 64), SECONDS), min_size=1, max_size=4), min_size=2, max_size=3)
    )
    return {
        f"job {job} point {point}": draw(st.lists(SECONDS, min_size=turns, max_size=turns))
        for job, of_job in enumerate(points)
        for point in range(len(of_job))
    }, points


@given(plans())
def test_points_stand_for_every_step_of_the_run(plan: RunPlan) -> None:
    points, lengths = timed_points(plan), {segment.kept_length for segment in plan.segments}
    assert sum(steps for _, steps in points) == pytest.approx(plan.steps)
    assert {min(lengths), max(lengths)} <= {kept for kept, _ in points} <= lengths
    assert all(steps >= 0 for _, steps in points)
    assert len(points) in (3, 4)


@given(plans(), SECONDS, SECONDS)
def test_times_that_grow_evenly_with_the_kept_length_add_up_to_those_of_the_run(plan, fixed, each) -> None:
    whole = sum((fixed + each * plan.at(step).kept_length) for step in range(plan.steps))
    assert sum(steps * (fixed + each * kept) for kept, steps in timed_points(plan)) == pytest.approx(whole)


def test_three_quarters_of_the_steps_in_half_the_time_save_three_eighths() -> None:
    seconds = {"job 0 point 0": [1.0, 2.0], "job 1 point 0": [0.5, 1.0], "job 1 point 1": [1.0, 2.0]}
    assert over_first(seconds, [[(8, 4.0)], [(4, 3.0), (8, 1.0)]]) == [[1.0, 1.0], [0.625, 0.625]]


@given(timings())
def test_a_job_beside_itself_takes_exactly_as_long(case) -> None:
    seconds, points = case
    again = {f"job 0 point {point}": seconds[f"job 0 point {point}"] for point in range(len(points[0]))}
    again |= {name.replace("job 0", "job 1"): values for name, values in again.items()}
    assert all(ratio == 1 for of_job in over_first(again, [points[0]] * 2) for ratio in of_job)


@given(timings(), st.lists(SECONDS, min_size=5, max_size=5))
def test_a_slow_turn_of_the_machine_does_not_show(case, slower) -> None:
    seconds, points = case
    slowed = {name: [s * by for s, by in zip(values, slower, strict=False)] for name, values in seconds.items()}
    for before, after in zip(over_first(seconds, points), over_first(slowed, points), strict=True):
        assert after == pytest.approx(before)


@given(timings())
def test_either_job_may_be_the_first(case) -> None:
    seconds, points = case
    other = {"job 0": "job 1", "job 1": "job 0"}
    swapped = {other.get(name[:5], name[:5]) + name[5:]: values for name, values in seconds.items()}
    there = over_first(seconds, points)[1]
    back = over_first(swapped, [points[1], points[0], *points[2:]])[1]
    assert [a * b for a, b in zip(there, back, strict=True)] == pytest.approx([1.0] * len(there))


def test_a_machine_that_slows_down_favours_neither_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes longer than the one before; who always went second would seem the slower one."""
    calls = count()

    def steps_of(config: ExperimentConfig) -> Callable[..., float]:
        return lambda kept_length: 1 + 0.001 * next(calls)

    monkeypatch.setattr(side_by_side, "_steps_of", steps_of)
    told: list[tuple[int, int]] = []
    _, second = time_side_by_side([experiment(**FULL)] * 2, lambda *now: told.append(now))
    assert second["median"] == pytest.approx(1, abs=2e-5)
    assert second["min"] < 1 < second["max"]
    assert told == [(turn, len(told)) for turn in range(1, len(told) + 1)]


@pytest.mark.long
def test_real_steps_are_timed_at_the_lengths_of_each_job() -> None:
    drops = experiment(scaling__cpus_per_worker=1)
    first, second, third = time_side_by_side(
        [experiment(**FULL, scaling__cpus_per_worker=1), drops, drops], lambda done, turns: None
    )
    assert first == {"median": 1, "min": 1, "max": 1, "unit": "x time", "turns": first["turns"]}
    assert first["turns"] in range(2, 41)
    assert all(0.01 < one["min"] <= one["median"] <= one["max"] < 100 for one in (second, third))


def test_a_job_that_cuts_its_sequences_is_timed_on_cut_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    forward = Gpt.forward
    monkeypatch.setattr(
        Gpt, "forward", lambda model, ids, labels, **more: seen.append(ids.shape) or forward(model, ids, labels, **more)
    )
    schedule = {"kind": "constant", "kept": 5}
    for method, tokens in (("random_ltd", TOKENS), ("sequence_warmup", 5)):
        drop = {"method": method, "schedule": schedule}
        config = experiment(drop=drop, scaling__cpus_per_worker=1, train__warmup="0 steps")
        side_by_side._steps_of(config)(kept_length=5)
        assert {shape[1] for shape in seen} == {tokens}
        seen.clear()


@pytest.mark.parametrize("method", ["token_bypass", "layer_dropout"])
def test_jobs_of_every_method_are_timed(method: str) -> None:
    keys = {"first": 1} if method == "token_bypass" else {"keep": 0.5, "by_depth": False}
    config = experiment(drop={"method": method, **keys}, scaling__cpus_per_worker=1, train__warmup="0 steps")
    length = config.plan.at(0).kept_length
    assert side_by_side._steps_of(config)(kept_length=length) > 0


def test_a_step_is_all_of_its_micro_batches_and_one_update() -> None:
    did: list[object] = []

    class Engine:
        def forward_backward(self, batch: object, *, share: float, last_micro_batch: bool) -> None:
            did.append((share, last_micro_batch))

        def step(self, *, lr: float, max_grad_norm: float) -> None:
            did.append("update")

    lengths = {"kept_length": TOKENS, "sequence_length": TOKENS}
    timed_step(Engine(), None, rows_of(range(2)), **lengths, micro_batches=4)  # pyright: ignore[reportArgumentType]
    assert did == [(0.25, False)] * 3 + [(0.25, True), "update"]


@pytest.mark.parametrize(
    ("scalings", "reason"),
    [
        ([{}], "there is one job"),
        ([{}, {"gpus_per_worker": 1}], "workers are on GPUs"),
        ([{"workers": 2}, {}], "there are several workers"),
        (
            [{}, {"mode": "schedule", "segments": [{"from": "0%", "workers": 1}, {"from": "50%", "workers": 2}]}],
            "there are several workers",
        ),
        ([{"cpus_per_worker": 1}, {"cpus_per_worker": 2}], "workers have different numbers of cores"),
    ],
)
def test_jobs_that_this_process_can_not_run_as_workers_do_are_not_timed(scalings, reason) -> None:
    assert why_not_timed([experiment(scaling=scaling) for scaling in scalings]) == reason


@pytest.mark.ray
def test_on_a_ray_of_its_own_small_jobs_are_timed_and_too_large_ones_are_not(ray_cluster) -> None:
    assert why_not_timed([experiment()] * 2) is None
    large = experiment(model__width=2**16, model__layers=10_000)
    assert why_not_timed([experiment(), large]) == "this machine's memory does not hold the models at once"
