"""What Prometheus is told of a run is what its record says, in so many series and no more."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED
from tiny import experiment
from tokendrop.config.task import MaskedLm
from tokendrop.track.mlflow import METRICS
from tokendrop.track.prometheus import legal_name
from tokendrop.track.run_metrics import ABOUT, MOST_SERIES, RunMetrics

CONFIG = experiment()
SECONDS = st.floats(0, 100)
FIGURES = st.dictionaries(st.text(max_size=8), st.floats(-9, 9), max_size=40)
WORKERS = st.integers(1, 2048)
EVENTS = st.one_of(
    st.fixed_dictionaries({"lost": st.text()}),
    st.fixed_dictionaries({"driver_from": st.integers(0, 5)}),
    st.fixed_dictionaries({"attempt_from": st.integers(0, 5), "world_size": WORKERS}),
    st.fixed_dictionaries({"paused_at": st.integers(0, 5), "world_size": WORKERS, "checkpoint_s": SECONDS}),
    st.dictionaries(st.text(max_size=8), SECONDS, max_size=40).flatmap(
        lambda parts: st.fixed_dictionaries(
            {
                "resize_at": st.integers(0, 5),
                "from": WORKERS,
                "to": WORKERS,
                "pause_s": st.just(sum(parts.values())),
                "parts_s": st.just(parts),
            }
        )
    ),
)


@st.composite
def step_lines(draw: st.DrawFn) -> dict[str, Any]:
    step, val_loss = draw(st.integers(1, CONFIG.plan.steps)), draw(st.none() | st.floats(0, 9))
    return {
        "step": step,
        "loss": draw(st.floats()),
        "val_loss": val_loss,
        "grad_norm": draw(st.floats(0, 9)),
        "lr": CONFIG.plan.lr(step - 1),
        "kept_length": CONFIG.plan.at(step - 1).kept_length,
        "tokens": step * CONFIG.plan.tokens_per_step,
        "layer_tokens": CONFIG.plan.layer_tokens(step),
        "flops": float(CONFIG.plan.flops(step)),
        "world_size": draw(WORKERS),
        "data_time_s": draw(SECONDS),
        "step_time_s": draw(SECONDS),
        "val_figures": None if val_loss is None else draw(FIGURES),
        "time": draw(st.floats(1e9, 2e9)),
    }


def told(lines: list[dict[str, Any]], *, with_profile: bool = False) -> dict[str, float]:
    """By metric, and by metric and part where it has parts."""
    scaling = replace(CONFIG.scaling, profile=replace(MEASURED, usd_per_gpu_hour=2.0) if with_profile else None)
    metrics = RunMetrics(replace(CONFIG, scaling=scaling))
    metrics.task = MaskedLm()  # whose figures are what was measured
    for line in lines:
        metrics.take(line)
    return {"|".join([name, *(value for _, value in tags)]): one for (name, tags), one in metrics.values(2e9).items()}


@given(st.lists(st.one_of(step_lines(), EVENTS), max_size=30))
def test_a_run_has_a_bounded_number_of_series_with_names_that_are_explained(lines) -> None:
    found = told(lines, with_profile=True)
    assert len(found) + len([name for name in ABOUT if name.startswith(("checkpoint/", "disk/"))]) <= MOST_SERIES
    names = {name.partition("|")[0] for name in found}
    assert all(name in ABOUT or name.startswith("quality/") for name in names)


@given(st.lists(st.one_of(step_lines(), EVENTS), max_size=30))
def test_values_are_those_of_the_last_step_and_sums_are_those_of_the_record(lines) -> None:
    found, steps = told(lines), [line for line in lines if "step" in line]
    resizes = [line for line in lines if "resize_at" in line]
    for name, field in METRICS.items():
        known = [line[field] for line in (steps if field == "val_loss" else steps[-1:]) if line[field] is not None]
        assert found.get(name) == pytest.approx(known[-1] if known else None, nan_ok=True)
    assert found["time/steps_s"] == pytest.approx(sum(line["step_time_s"] for line in steps))
    assert found["time/data_s"] == pytest.approx(sum(line["data_time_s"] for line in steps))
    assert found["events/resizes"] == len(resizes)
    assert found["events/lost"] == sum("lost" in line for line in lines)
    parts = [value for name, value in found.items() if name.startswith("resize/part_s|")]
    assert sum(parts) == pytest.approx(found["time/pauses_s"])
    worker_s = sum(line["step_time_s"] * line["world_size"] for line in steps)
    worker_s += sum(line["pause_s"] * max(line["from"], line["to"]) for line in resizes)
    assert found["cost/worker_hours"] == pytest.approx(worker_s / 3600)


def test_a_restart_is_an_attempt_that_no_pause_asked_for() -> None:
    attempt, pause = {"attempt_from": 2, "world_size": 1}, {"paused_at": 2, "world_size": 1, "checkpoint_s": 1.0}
    assert told([attempt])["events/restarts"] == 0
    assert told([attempt, pause, attempt])["events/restarts"] == 0
    assert told([attempt, {"lost": "rank 0"}, attempt])["events/restarts"] == 1


def test_since_the_last_step_is_told_until_training_is_over() -> None:
    assert told([])["time/since_step_s"] > 0
    before = {"attempt_from": 3, "world_size": 1}
    assert told([before])["progress/step"] == 3
    metrics = RunMetrics(CONFIG)
    last = {"step": CONFIG.plan.steps, "val_loss": None, "time": 100.0, "world_size": 1, "layer_tokens": 1}
    others = dict.fromkeys({*METRICS.values()} - last.keys(), 1.0)
    metrics.take({**others, **last, "step": 3})
    assert metrics.values(130.0)["time/since_step_s", ()] == 30
    metrics.take({**others, **last})
    assert ("time/since_step_s", ()) not in metrics.values(130.0)


def test_legal_names_are_legal_and_as_different_as_the_metrics() -> None:
    legal = [legal_name(name) for name in ABOUT]
    assert len({*legal}) == len(ABOUT)
    assert all(re.fullmatch(r"tokendrop_[a-zA-Z0-9_]+", name) for name in legal)
    assert legal_name("loss/train") == "tokendrop_loss_train"
    assert {*METRICS} <= {*ABOUT}
