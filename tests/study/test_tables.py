"""What the tables at a sweep's end say of its arms."""

import math
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sweeps import trials_of, write_sweep
from tokendrop.errors import UserError
from tokendrop.study.arms import arms_of
from tokendrop.study.evidence import evidence_of, write_rows
from tokendrop.study.progress import Progress
from tokendrop.study.record import SweepRecord
from tokendrop.study.sweep import load_sweep
from tokendrop.study.tables import result_of, result_text

COSTS = {"layer_tokens": 100, "flops": 1000, "wall_clock_s": 1.0}
LOSSES = st.floats(0.5, 9, allow_subnormal=False)


def ended(folder: Path, losses: list[list[float | None]], **keys: Any) -> tuple[dict[str, Any], str]:
    """What a sweep came to, for scripts and for people.

    Args:
        losses: of each arm, its validation loss by seed; None where a trial has not ended.
    """
    rates = [1e-3 * (1 + number) for number in range(len(losses))]
    path = write_sweep(folder, axes={"train.peak_lr": rates}, seeds=len(losses[0]), **keys)
    sweep, trials = load_sweep(path), trials_of(path)
    progress = Progress(sweep, trials, SweepRecord(folder, sweep.name))
    for trial in trials:
        loss = losses[rates.index(trial.config.train.peak_lr)][trial.config.seed - 1234]
        if loss is not None:
            progress.finish(trial.run, {"val_loss": loss, **COSTS})
    arms = arms_of(sweep, trials, progress.summaries)
    return result_of(sweep, trials, arms, progress), result_text(sweep, arms, progress)


@settings(max_examples=15)
@given(seeds=st.integers(2, 6), arms=st.integers(2, 4), direction=st.sampled_from(["min", "max"]), drawn=st.data())
def test_an_arm_is_worse_by_the_mean_of_its_pairs_with_scipys_interval(tmp_path_factory, seeds, arms, direction, drawn):
    losses = [drawn.draw(st.lists(LOSSES, min_size=seeds, max_size=seeds)) for _ in range(arms)]
    result, _ = ended(tmp_path_factory.mktemp("sweep"), losses, direction=direction)
    best = losses[result["best"]]
    for number, (arm, values) in enumerate(zip(result["arms"], losses, strict=True)):
        if number == result["best"]:
            assert arm["worse"] is None
            continue
        worse, other = (values, best) if direction == "min" else (best, values)
        apart = [one - two for one, two in zip(worse, other, strict=True)]
        assert arm["worse"]["mean"] == pytest.approx(sum(apart) / seeds, abs=1e-9)
        assert arm["worse"]["mean"] >= -1e-9
        assert arm["worse"]["seeds"] == seeds
        if max(apart) - min(apart) > 1e-6:
            expected: Any = stats.ttest_rel(worse, other).confidence_interval(0.95)
            found = (arm["worse"]["low"], arm["worse"]["high"])
            assert found == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_the_table_has_a_column_of_it_which_only_whole_arms_have(tmp_path):
    _, text = ended(tmp_path, [[3.0, 4.0, 5.0], [3.1, 4.2, 5.3], [2.0, None, 2.0]])
    header, _, best, second, open_ = text.splitlines()[:5]
    assert header.split("  ")[-1].strip() == "training time"
    assert "worse by (95%)" in header
    column = header.index("worse by (95%)")
    assert best[column:].lstrip().startswith("100")  # layer tokens, after an empty cell
    assert re.search(r" 0\.2 \(-0\.0484 to 0\.448\) ", second)
    assert "(" not in open_


def test_one_seed_has_no_interval(tmp_path):
    result, text = ended(tmp_path, [[3.0], [3.25]])
    assert [arm["worse"] for arm in result["arms"]] == [None, {"mean": 0.25, "low": None, "high": None, "seeds": 1}]
    assert re.search(r" 0\.25 ", text)
    assert " to " not in text.splitlines()[3].replace("3.25 to 3.25", "")


def test_without_an_arm_that_is_whole_none_is_compared(tmp_path):
    result, text = ended(tmp_path, [[3.0, None], [3.25, None]])
    assert [arm["worse"] for arm in result["arms"]] == [None, None]
    assert "best:" not in text


@pytest.mark.parametrize(("summary", "value"), [({"val_loss": 0.0}, 0.0), ({"val_loss": 0}, 0.0), ({}, None)])
def test_a_metric_of_exactly_0_is_a_value_and_only_one_that_is_missing_is_none(tmp_path, summary, value):
    path = write_sweep(tmp_path)
    trials = trials_of(path)
    progress = Progress(load_sweep(path), trials, SweepRecord(tmp_path, "tiny"))
    progress.finish(trials[0].run, summary)
    progress.note_stopped(trials[1].run, summary)
    for trial in trials[:2]:
        assert progress.value(trial.run) == pytest.approx(float("nan") if value is None else value, nan_ok=True)
    assert progress.value(trials[2].run) is None


def test_an_arm_that_diverged_is_named_keeps_its_costs_and_decides_nothing(tmp_path) -> None:
    claim = {"arm": {"train.peak_lr": 2e-3}, "against": {"train.peak_lr": 1e-3}, "margin": 0.1}
    result, text = ended(tmp_path, [[3.0, 3.1], [float("nan"), 3.0]], claim=claim)
    assert result["verdict"]["answer"] == "undecided"
    assert "verdict: undecided, for val_loss is not finite in every seed of both arms" in text
    (line,) = (line for line in text.splitlines() if line.startswith("not finite"))
    assert line.endswith(": val_loss is nan; its arm is not compared")
    (row,) = (line.split() for line in text.splitlines() if line.startswith("2 "))
    assert row == ["2", "0.002", "2", "100", "1k", "1.0", "s"]


def test_by_the_median_no_arm_is_said_to_be_worse_in_the_mean(tmp_path) -> None:
    result, text = ended(tmp_path, [[3.0, 3.0, 9.0], [3.1, 3.1, 3.1]], aggregate="median")
    assert result["best"] == 0
    assert [arm["worse"] for arm in result["arms"]] == [None, None]
    assert "worse" not in text


def test_a_metric_that_finished_trials_lack_ends_the_sweep_in_one_sentence(tmp_path) -> None:
    path = write_sweep(tmp_path, axes={"train.peak_lr": [1e-3]}, seeds=1, metric="val_accuracy", direction="max")
    sweep, trials = load_sweep(path), trials_of(path)
    progress = Progress(sweep, trials, SweepRecord(tmp_path, sweep.name))
    progress.finish(trials[0].run, {"val_loss": 3.0, **COSTS})
    with pytest.raises(UserError, match=r"^metric: no trial reports val_accuracy; want one of val_loss$"):
        progress.raise_fault()
    assert result_text(sweep, arms_of(sweep, trials, progress.summaries), progress)


def test_a_study_in_which_a_trial_diverged_keeps_its_rows_and_no_verdict(tmp_path) -> None:
    claim = {"arm": {"train.peak_lr": 2e-3}, "against": {"train.peak_lr": 1e-3}, "margin": 0.1}
    path = write_sweep(tmp_path, axes={"train.peak_lr": [1e-3, 2e-3]}, seeds=2, claim=claim)
    sweep, trials = load_sweep(path), trials_of(path)
    progress = Progress(sweep, trials, SweepRecord(tmp_path, sweep.name))
    for number, trial in enumerate(trials):
        progress.finish(trial.run, {"val_loss": 3.0 + number, **COSTS})
    assert evidence_of("any", "small", "", progress) is not None
    progress.finish(trials[0].run, {"val_loss": None, **COSTS})
    assert evidence_of("any", "small", "", progress) is None
    write_rows(tmp_path / "rows.parquet", progress)
    assert [math.isnan(row["val_loss"]) for row in pq.read_table(tmp_path / "rows.parquet").to_pylist()].count(
        True
    ) == 1
