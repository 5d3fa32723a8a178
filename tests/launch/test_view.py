"""The view of a run says what its record holds."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded import record
from tokendrop.launch.view import RunView, clock, sparkline
from tokendrop.track.journal import MetricsTail
from tokendrop.track.run_folder import open_run_folder

BARS = "▁▂▃▄▅▆▇█"
ELASTIC = {
    "mode": "fit_per_segment",
    "workers": 2,
    "segments": [{"from": "0%", "workers": 1}, {"from": "50%", "workers": 2}],
}


def view_of(run: Path) -> tuple[RunView, list[str]]:
    """The view after all of a record, and what was said besides."""
    view = RunView(open_run_folder(run)[0])
    return view, [said for line in MetricsTail(run).read() if (said := view.take(line))]


def rows(panel: str) -> dict[str, str]:
    return {line[:8].strip(): line[10:] for line in panel.splitlines()}


def test_the_panel_has_what_the_record_has(tmp_path: Path) -> None:
    view, said = view_of(record(tmp_path / "run", last=6, scaling=ELASTIC, committed=False))
    view.saved, view.state = (4, 75.0), "trains"
    found = rows(view.panel())
    assert said == []
    assert found["step"].startswith("6 of 12, 50%; 0:0")
    assert found["loss"].startswith("2.581  █")
    assert found["loss"].endswith("▁ since step 1")
    assert found["held out"] == "2.810 at step 4"
    saving = 1 - view.plan.layer_tokens(6) / (view.plan.layer_tokens_full // 2)
    assert found["kept"] == f"10 of 16 tokens; {saving:.1%} of layer tokens saved"
    assert found["workers"].startswith("1; 2 from step 6 on, in 0:00")
    assert (found["saved"], found["state"]) == ("step 4, 1:15 ago", "trains")


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    run = record(tmp_path / "run", last=7, committed=False)
    view, said = view_of(record(run, first=4, last=6, seed=9, committed=False))
    assert said == []  # it was paused
    assert view.done == 6
    assert [step for step, _ in view._losses] == [1, 2, 3, 4, 5, 6]
    assert rows(view.panel())["loss"].startswith("2.661")


def test_the_curve_of_a_long_run_leaves_out_its_first_half(tmp_path: Path) -> None:
    view, _ = view_of(record(tmp_path / "run", steps=100))
    assert rows(view.panel())["loss"].endswith("▁ since step 51")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_no_numbers_are_shown_as_such(tmp_path: Path, loss: float) -> None:
    run = record(tmp_path / "run", loss=lambda step, seed: loss if step > 6 else 3.0, committed=False)
    view, _ = view_of(run)
    assert rows(view.panel())["loss"] == f"{loss:.3f}  ▁▁▁▁▁▁?????? since step 1"


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(NUMBERS), st.integers(1, 40))
def test_a_curve_has_so_many_characters_and_rises_where_values_do(values: list[float], width: int) -> None:
    curve = sparkline(values, width)
    assert len(curve) == min(width, len(values))
    assert set(curve) <= {*BARS, "?"}
    rising = sparkline(sorted(one for one in values if math.isfinite(one)), width)
    assert [*rising] == sorted(rising, key=BARS.index)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=20))
def test_the_least_is_at_the_bottom_and_the_most_at_the_top(values: list[float]) -> None:
    curve = sparkline(values, len(values))
    assert curve[values.index(min(values))] == BARS[0]
    if max(values) / 2 > min(values) / 2:
        assert curve[values.index(max(values))] == BARS[-1]


@given(st.integers(0, 10**7))
def test_a_time_is_read_as_it_was_written(seconds: int) -> None:
    days, _, rest = clock(seconds).rpartition(" d ")
    total = 0
    for part in rest.split(":"):
        total = 60 * total + int(part)
    assert 24 * 3600 * int(days or 0) + total == seconds


def test_times_that_are_none() -> None:
    assert [clock(one) for one in (-3.0, math.nan, math.inf, 0.4)] == ["0:00", "?", "?", "0:00"]
