"""What the tables of runs say, and what they leave out."""

import re

import pytest

from tokendrop.cli.compare import comparison_text
from tokendrop.cli.train import run_text

STEP_TIMES = [{"median": 1.0, "min": 1.0, "max": 1.0, "turns": 9}, {"median": 0.854, "min": 0.81, "max": 1.03}]


def result(*, seconds: float, share: float) -> dict[str, object]:
    return {
        "val_loss": 4.5,
        "val_perplexity": 90.017,
        "layer_tokens": 2e6 * share,
        "layer_token_saving": 1 - share,
        "flops": 1e13 * share,
        "wall_clock_s": seconds,
        "tokens_per_s": 1e5 / seconds,
        "step_time_s": {"median": 0.2, "p10": 0.1, "p90": 0.4},
    }


RUNS = [result(seconds=100.0, share=1.0), result(seconds=114.0, share=0.75)]


def test_only_what_was_measured_in_turns_is_told_as_time_saved() -> None:
    text = comparison_text(RUNS, ["whole", "drops"], step_times=STEP_TIMES)
    first, second = text.splitlines()[2:4]
    assert "median (least to most) of 9 turns" in text
    assert re.split("  +", first) == ["whole", "4.500", "90.0", "2M", "10T", "100.0 s"]
    saved = "-14.6% (-19% to +3%)"
    assert re.split("  +", second) == ["drops", "4.500", "90.0", "1.5M (-25.0%)", "7.5T (-25.0%)", saved, "114.0 s"]


def test_without_turns_each_run_tells_its_own_spread_and_why() -> None:
    text = comparison_text(RUNS, ["whole", "drops"], step_times=None, not_timed="workers are on GPUs")
    assert [re.split("  +", row)[5] for row in text.splitlines()[2:4]] == ["0.2 s (0.1 to 0.4)"] * 2
    assert "not measured in turns: workers are on GPUs." in text
    assert "%" not in "".join(row.rpartition("0.2 s")[2] for row in text.splitlines()[2:4])


@pytest.mark.parametrize("drops", [False, True])
def test_what_to_expect_at_scale_is_told_where_tokens_are_dropped(drops: bool) -> None:
    text = comparison_text([RUNS[0], RUNS[drops]], ["one", "other"], step_times=STEP_TIMES)
    assert ("25.6% of the wall clock at 1.3B" in text) is drops


def test_a_run_alone_tells_its_speed() -> None:
    assert run_text(RUNS[0], "whole").splitlines()[2].split()[-1] == "1,000"
