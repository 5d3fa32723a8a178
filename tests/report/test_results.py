"""`tokendrop.results`: tables that have what run folders have."""

import math
import runpy
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded import record
from tokendrop import results
from tokendrop.errors import UserError
from tokendrop.report.listing import job_tree
from tokendrop.track.journal import STEPS, read_steps
from tokendrop.track.run_folder import summarize

NOTEBOOK = Path(__file__).parents[2] / "jobs" / "examples" / "held_out_loss.py"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs that ended and one that did not, beside what else lies in a folder of runs."""
    folder = tmp_path / "runs"
    record(folder / "a-drops", name="drops")
    record(folder / "b-whole", name="whole", drop={"method": "none"}, seed=2)
    record(folder / "c-live", name="drops", last=7, committed=False, seed=3)
    for name in ("data", "sweeps"):
        (folder / name).mkdir()
    (folder / "report.html").touch()
    return folder


def test_steps_are_those_of_the_records(runs: Path) -> None:
    steps = results.load(f"{runs}/*").steps
    for run in ("a-drops", "b-whole"):
        own = steps.filter(pc.field("run") == str(runs / run)).to_pylist()
        kept = own[0].keys() - {"run", "name", "seed", "seconds"}
        assert [{key: row[key] for key in kept} for row in own] == [
            {key: row[key] for key in kept} for row in read_steps(runs / run)
        ]
        assert own[-1]["seconds"] == pytest.approx(summarize(runs / run)["wall_clock_s"])
    assert steps.filter(pc.field("name") == "drops")["step"].to_pylist() == [*range(1, 13), *range(1, 8)]


def test_summaries_are_what_the_runs_came_to_and_their_jobs(runs: Path) -> None:
    rows = {Path(row["run"]).name: row for row in results.load(runs).summaries.to_pylist()}
    for run in ("a-drops", "b-whole"):
        summary = summarize(runs / run)
        alike = summary.keys() & rows[run].keys() - {"steps"}
        assert {"val_loss", "val_perplexity", "layer_tokens", "flops_saving", "wall_clock_s", "tokens_per_s"} <= alike
        assert {key: rows[run][key] for key in alike} == pytest.approx({key: summary[key] for key in alike})
        job = job_tree(runs / run)
        assert {rows[run][key] for key in ("drop.method", "train.peak_lr")} == {job["drop.method"], 0.01}
        assert job.keys() <= rows[run].keys()
    assert (rows["c-live"]["state"], rows["c-live"]["step"], rows["c-live"]["steps"]) == ("stopped", 7, 12)


def test_several_paths_are_read_in_their_order_and_each_run_once(runs: Path) -> None:
    found = results.load([runs / "b-whole", f"{runs}/[ab]*", str(runs)])
    names = ["b-whole", "a-drops", "c-live"]
    assert [Path(run).name for run in found.summaries["run"].to_pylist()] == names
    alone = [results.load(runs / name).steps for name in names]
    assert found.steps.equals(pa.concat_tables(alone))


def test_what_can_not_be_read_is_told_and_left_out(runs: Path) -> None:
    next((runs / "a-drops" / STEPS).glob("*")).write_text("cut")
    record(runs / "d-begun", last=0, committed=False)
    with pytest.warns(UserWarning, match=r"^2 of 4 runs: Left out: .*a-drops.*damaged.*Left out: .*d-begun.* no step"):
        found = results.load(runs)
    assert len(found.left_out) == 2
    assert repr(found) == "<Results of 2 runs, 19 steps, 2 left out>"


def test_a_loss_that_is_no_number_is_null_where_held_out_and_itself_in_training(tmp_path: Path) -> None:
    record(tmp_path / "run", loss=lambda step, seed: math.nan if step > 6 else 3.0)
    found = results.load(tmp_path / "run")
    assert [step for step, loss in enumerate(found.steps["val_loss"].to_pylist(), 1) if loss is not None] == [4]
    assert math.isnan(found.steps["loss"][-1].as_py())
    assert found.summaries["val_loss"].to_pylist() == [3.0]


def test_paths_without_runs_are_named(runs: Path) -> None:
    for wanted, said in {
        "nowhere-*": "it matches nothing that is a run folder; want those that 'tokendrop train' made",
        "[ds]*a*": "none of the 1 paths that it matches is a run folder",
        "data": "no run folder in it; want one that 'tokendrop train' made",
        "nowhere": "no such folder; want a run folder, or a folder of them",
        "report.html": "no such folder",
    }.items():
        with pytest.raises(UserError) as error:
            results.load(runs / wanted)
        assert str(error.value).startswith(f"{runs}/{wanted}: {said}")
    with pytest.raises(UserError, match="want at least one run folder or pattern"):
        results.load([])


def test_a_folder_whose_name_is_a_pattern_is_that_folder(tmp_path: Path) -> None:
    record(tmp_path / "runs" / "lr[1]")
    assert len(results.load(tmp_path / "runs" / "lr[1]").summaries) == 1


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers())


@given(st.lists(VALUES, min_size=1))
def test_any_values_of_jobs_make_a_column(values: list[object]) -> None:
    found = results._column(values).to_pylist()
    assert [one is None for one in found] == [one is None for one in values]
    assert len({type(one) for one in found if one is not None}) <= 1
    kinds = {type(one) for one in values if one is not None}
    if len(kinds) == 1 and not kinds & {list, int}:
        assert found == values


def test_the_notebook_compares_runs_at_equal_layer_tokens(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(runs / "c-live")
    monkeypatch.chdir(runs.parent)
    found = runpy.run_path(str(NOTEBOOK))
    drops, whole = summarize(runs / "a-drops"), read_steps(runs / "b-whole")
    assert found["layer_tokens"] == drops["layer_tokens"] < whole[-1]["layer_tokens"]
    assert found["at_equal_cost"]["runs/a-drops"] == drops["val_loss"]
    losses = [row["val_loss"] for row in whole if row["val_loss"] is not None]
    assert losses[0] > found["at_equal_cost"]["runs/b-whole"] > losses[-1]
    assert (runs.parent / "held_out_loss.svg").read_text().startswith("<svg")
    assert "'drop.method': 'none'" in capsys.readouterr().out
