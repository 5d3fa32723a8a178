"""`tokendrop report`: its page and pictures have what run folders have, and say what they lack."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from recorded import loss_of, record
from tokendrop.cli.main import main
from tokendrop.config.run import SWEEP
from tokendrop.report.arms import arms_of, difference, reference
from tokendrop.report.charts import FIGURES, spec_of
from tokendrop.report.curves import datasets, thinned
from tokendrop.report.record import read_record, read_runs
from tokendrop.track.decisions import note_decision
from tokendrop.track.journal import STEPS, note_start, read_steps
from tokendrop.track.run_folder import JOB, TRIALS, summarize
from tokendrop.train.adaptive import Decision

SEEDS = (1, 2, 3)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds that drop tokens, and three at full length."""
    for seed in SEEDS:
        record(tmp_path / "runs" / f"drops-{seed}", seed=seed, name="drops")
        record(tmp_path / "runs" / f"whole-{seed}", seed=seed, name="whole", drop={"method": "none"})
    return tmp_path / "runs"


def page_of(runs: Path, *more: object) -> str:
    to = runs.parent / "page.html"
    main(["report", str(runs), *map(str, more), "--to", str(to)])
    return to.read_text()


def data_of(page: str) -> dict[str, list[dict[str, object]]]:
    (found,) = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    return json.loads(found)


def test_seeds_of_a_job_are_one_arm_whose_curve_is_their_mean(runs: Path) -> None:
    data = data_of(page_of(runs))
    losses = [loss_of(4, seed) for seed in SEEDS]
    (row,) = [one for one in data["validation"] if (one["arm"], one["step"]) == ("drops", 4)]
    assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert (row["low"], row["high"]) == pytest.approx((min(losses), max(losses)), rel=1e-5)
    assert row["layer_tokens"] == read_steps(runs / "drops-1")[3]["layer_tokens"]
    seconds = [sum(step["step_time_s"] for step in read_steps(runs / f"drops-{seed}")[:4]) for seed in SEEDS]
    assert row["seconds"] == pytest.approx(np.mean(seconds), rel=1e-5)


def test_the_page_says_what_was_run_what_came_out_and_what_it_saves(runs: Path) -> None:
    page, summary = page_of(runs), summarize(runs / "drops-1")
    assert "6 runs of 2 arms: a GPT of 4 layers" in page
    assert "drops ended at a validation loss of" in page
    assert f"saves {summary['layer_token_saving']:.1%} of the layer tokens" in page
    assert f"{summary['flops_saving']:.1%} of the FLOPs by plan" in page
    assert "tokendrop train " in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page.partition("<script>")[0])
    assert "default-src 'none'" in page


def test_arms_and_data_stand_in_the_order_in_which_runs_were_given(runs: Path) -> None:
    def told(*folders: str) -> tuple[list[str], list[str], list[str]]:
        page = page_of(runs / folders[0], *(runs / folder for folder in folders[1:]))
        data = data_of(page)
        legend = re.findall(r"const specs = (.*);$", page, re.MULTILINE)[0]
        domains = re.findall(r'"domain":(\["[^]]*\])', legend)
        return [*data], [*dict.fromkeys(str(row["arm"]) for row in data["validation"])], [*dict.fromkeys(domains)]

    one, other = told("drops-2", "whole-1", "drops-1"), told("whole-1", "drops-1", "drops-2")
    assert one[0] == other[0] == ["validation", "training", "schedule", "throughput", "time", "marks"]
    assert (one[1], other[1]) == (["drops", "whole"], ["whole", "drops"])
    assert '["drops","whole"]' in one[2]
    assert '["whole","drops"]' in other[2]


def test_the_reference_is_the_arm_that_drops_nothing_and_paired_seeds_narrow_the_interval(runs: Path) -> None:
    arms = arms_of(read_runs([runs])[0])
    assert [arm.label for arm in arms] == ["drops", "whole"]
    assert reference(arms).label == "whole"
    found = difference(arms[0], arms[1])
    assert (found.mean, found.how) == (pytest.approx(0), "3 seeds, paired")
    assert found.low <= found.mean <= found.high


def test_arms_of_one_name_are_told_apart_by_the_keys_that_differ(tmp_path: Path) -> None:
    runs = [record(tmp_path / "runs" / f"r{lr}", train__peak_lr=lr) for lr in (0.01, 0.02)]
    assert [arm.label for arm in arms_of(map(read_record, runs))] == ["tiny peak_lr=0.01", "tiny peak_lr=0.02"]


def test_arms_that_differ_in_much_are_told_apart_by_one_key_and_seeds_not_by_their_decisions(tmp_path: Path) -> None:
    adaptive = {"kind": "adaptive", "start": 4, "increment": 3, "every": "1 steps", "budget": 0.5, "decided": []}
    runs = [record(tmp_path / f"a{seed}", seed=seed, drop__schedule=adaptive) for seed in (1, 2)]
    for run, kept in zip(runs, (4, 7), strict=True):
        note_decision(run, "schedule", Decision(step=1, kept_length=kept, gap=0.1))
    runs.append(record(tmp_path / "linear", seed=1))
    arms = arms_of(map(read_record, runs))
    assert [(arm.label, len(arm.runs)) for arm in arms] == [("tiny kind=adaptive", 2), ("tiny kind=linear", 1)]


def test_a_sweep_is_the_runs_of_its_trials_told_apart_by_what_it_varies(tmp_path: Path) -> None:
    runs, track = tmp_path / "runs", {"uri": None, "tags": {SWEEP: "rates"}}
    names = [f"trial-{number}" for number in range(4)]
    for name, (rate, seed) in zip(names, [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)], strict=True):
        record(runs / name, seed=seed, name=name, track=track, train__peak_lr=rate)
    record(runs / "other", seed=1)
    sweep = runs / "sweeps" / "rates"
    sweep.mkdir(parents=True)
    (sweep / TRIALS).write_text(json.dumps({"sweep": "rates.yaml", "trials": {name: {} for name in [*names, "later"]}}))
    steps = data_of(page_of(sweep))["training"]
    assert {row["arm"] for row in steps} == {"rates peak_lr=0.001", "rates peak_lr=0.002"}


def test_resizes_and_restarts_are_marked_where_they_were(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "elastic"
    note_start_of(run)
    record(run, last=4, committed=False)
    record(run, first=4, last=8, world_size=2)
    record(run, first=8, world_size=2)
    assert read_record(run).marks() == [(4, "resize, 1 to 2 workers"), (8, "restart with 2 workers")]
    (arm,) = arms_of([read_record(run)])
    assert [row["kind"] for row in datasets([arm])["marks"]] == ["resize", "restart"]


def note_start_of(run: Path) -> None:
    run.mkdir(parents=True)
    note_start(run, 0)


def test_a_run_before_its_first_commit_is_drawn_from_its_live_record(tmp_path: Path) -> None:
    found = read_record(record(tmp_path / "runs" / "short", last=5, committed=False))
    assert found.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert found.notes() == ["short has stopped, at step 5 of 12."]


def test_losses_that_are_no_numbers_are_left_out_with_a_note(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    record(runs / "bad", loss=lambda step, seed: math.nan if step > 6 else 3.0)
    page = page_of(runs)
    assert "bad has a training loss that is not a number at 6 steps, step 7 first." in page
    assert [row["loss"] for row in data_of(page)["training"]][5:] == [3] + [None] * 6
    assert "NaN" not in json.dumps(data_of(page))


def test_what_can_not_be_drawn_is_left_out_with_a_note_or_named(runs: Path, complaint, tmp_path: Path) -> None:
    (runs / "drops-1" / JOB).write_text("name: changed\n")
    record(runs / "short", last=8, seed=9, name="drops")
    next((runs / "drops-2" / STEPS).glob("*")).write_text("cut")
    record(runs / "begun", last=0, committed=False)
    page = page_of(runs)
    for said in ("drops-1/job.yaml: damaged", "this part of the steps is damaged", "begun: this run has no step yet"):
        assert f"Left out: {runs}/" in page
        assert said in page
    assert "short has stopped, at step 8 of 12." in page
    assert complaint("report", runs / "begun", "--to", tmp_path / "x.html").startswith(f"{runs}/begun: this run has no")
    (tmp_path / "foreign").mkdir()
    assert complaint("report", tmp_path / "foreign").startswith(f"{tmp_path}/foreign: no run folder in it; want ")
    assert complaint("report", runs, "--figure", "pie").startswith("--figure: want one of loss-steps, ")
    assert complaint("report", runs, "--to", "page.pdf") == "--to: want a file that ends in .html or .htm, got page.pdf"


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_chart_is_a_picture_of_its_own(runs: Path, tmp_path: Path, suffix: str) -> None:
    to = tmp_path / f"chart{suffix}"
    main(["report", str(runs), "--figure", "loss-flops", "--to", str(to)])
    content = to.read_bytes()
    assert content.startswith(b"<svg" if suffix == ".svg" else b"\x89PNG")
    assert suffix != ".svg" or content.count(b'aria-roledescription="line mark"') >= 2


def test_every_chart_tells_what_it_shows() -> None:
    for figure in FIGURES:
        assert spec_of(figure, ["a", "b"], marked=True, legend=False)["description"].startswith(figure.title)


@pytest.mark.parametrize(("count", "most"), [(1, 50), (50, 50), (51, 50), (10_000, 500)])
def test_thinned_curves_keep_their_ends_and_what_they_are_told_to(count: int, most: int) -> None:
    places = thinned(count, most, keep=[count // 3])
    assert len(places) <= max(most, 1)
    assert {0, count // 3, count - 1} <= {*places.tolist()}
    assert (np.diff(places) > 0).all()


def test_markup_in_a_folders_name_is_text(tmp_path: Path) -> None:
    record(tmp_path / "</script><b>" / "runs" / "run")
    page = page_of(tmp_path / "</script><b>" / "runs")
    assert "</script><b>" not in page
    assert page.count("</script>") == 2
