"""A sweep before it starts: its trials, what they are called, and what is wrong with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpora import tiny_job
from sweeps import DROPS, trials_of, write_sweep
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.schedule.duration import Duration
from tokendrop.study.budget import cost_of, within
from tokendrop.study.identity import WHERE, run_name, settings_of

ROOT = Path(__file__).parents[2]
# --- the trials ---


def test_a_grid_has_every_cell_with_every_seed(tmp_path):
    trials = trials_of(write_sweep(tmp_path, seeds=[5, 7]))
    found = [(one.config.train.peak_lr, one.config.model.layers, one.config.seed) for one in trials]
    assert found == [(rate, layers, seed) for seed in (5, 7) for rate in (1e-3, 2e-3) for layers in (2, 3)]
    assert len({one.run for one in trials}) == 8


def test_a_number_of_seeds_counts_from_the_jobs_own(tmp_path):
    assert {one.config.seed for one in trials_of(write_sweep(tmp_path, seeds=3))} == {1234, 1235, 1236}


def test_an_axis_with_a_condition_is_only_where_it_holds(tmp_path):
    kept = {"kind": "grid", "values": [8, 16], "when": {"drop.method": "random_ltd"}}
    axes = {"drop": [{"method": "none"}, DROPS], "drop.schedule.kept": kept}
    trials = trials_of(write_sweep(tmp_path, axes=axes))
    assert [dict(one.point).get("drop.schedule.kept") for one in trials] == [None, 8, 16]
    assert [one.config.drop.method for one in trials] == ["none", "random_ltd", "random_ltd"]


def test_multiples_are_those_that_are_written(tmp_path):
    axis = {"kind": "uniform", "low": 0.1, "high": 0.3, "multiple_of": 0.1}
    found = {
        one.config.model.dropout for one in trials_of(write_sweep(tmp_path, axes={"model.dropout": axis}, samples=20))
    }
    assert found == {0.1, 0.2, 0.3}


RATE = {"kind": "log_uniform", "low": 1e-4, "high": 1e-2}


def drawn(folder: Path, **keys: Any) -> list[float]:
    path = write_sweep(folder, **{"axes": {"train.peak_lr": RATE}, "samples": 20, **keys})
    return [one.config.train.peak_lr for one in trials_of(path)]


def test_draws_are_those_of_their_seed_and_lie_between_their_bounds(tmp_path):
    assert drawn(tmp_path) == drawn(tmp_path)
    assert drawn(tmp_path) != drawn(tmp_path, draw_seed=1)
    assert drawn(tmp_path)[:5] == drawn(tmp_path, samples=5)
    assert all(1e-4 <= rate <= 1e-2 for rate in drawn(tmp_path))
    assert len(set(drawn(tmp_path))) == 20


def test_a_draw_does_not_depend_on_other_axes(tmp_path):
    both = {"model.layers": {"kind": "choice", "values": [2, 3]}, "train.peak_lr": RATE}
    assert drawn(tmp_path) == drawn(tmp_path, axes=both)


def test_whole_numbers_are_drawn_as_multiples(tmp_path):
    width = {"kind": "uniform", "low": 32, "high": 96, "multiple_of": 32}
    trials = trials_of(write_sweep(tmp_path, axes={"model.width": width}, samples=30))
    assert {one.config.model.width for one in trials} == {32, 64, 96}  # each once: the same run is not drawn twice
    assert len(trials) == 3


# --- the name of a run ---

PLACES = {"runs_folder": "elsewhere", "scaling": {"cpus_per_worker": 7}, "checkpoint": {"keep": 5}, "run": "here"}
PLACES |= {"track": {"uri": "sqlite:///other.db"}, "name": "other"}
TRAINS = {
    **{"train.length": "3 steps", "train.peak_lr": 2e-3, "train.micro_batch": 4, "seed": 1, "model.layers": 3},
    **{"drop": DROPS, "data.validation_share": 0.2, "evaluate.sequences": 5, "train.decay": "linear"},
}


def tree_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load(tiny_job(folder, ["python"]).read_text())


def name_of(folder: Path, tree: dict[str, Any], *overrides: str) -> str:
    job = folder / "one.yaml"
    job.write_text(yaml.safe_dump(tree, sort_keys=False))
    return run_name(settings_of(load_job(job, overrides)))


def permuted(tree: dict[str, Any], chance: Any) -> dict[str, Any]:
    keys = list(tree)
    chance.shuffle(keys)
    return {key: permuted(tree[key], chance) if isinstance(tree[key], dict) else tree[key] for key in keys}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(chance=st.randoms(), places=st.sets(st.sampled_from(sorted(PLACES))))
def test_the_order_of_keys_and_where_a_run_is_do_not_show_in_its_name(tmp_path, chance, places):
    tree = tree_of(tmp_path)
    moved = permuted(tree | {key: PLACES[key] for key in places}, chance)
    assert name_of(tmp_path, moved) == name_of(tmp_path, tree)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(one=st.sets(st.sampled_from(sorted(TRAINS))), other=st.sets(st.sampled_from(sorted(TRAINS))))
def test_what_is_trained_shows_in_its_name(tmp_path, one, other):
    tree = tree_of(tmp_path)
    names = [name_of(tmp_path, tree, *(f"{key}={json.dumps(TRAINS[key])}" for key in keys)) for keys in (one, other)]
    assert (names[0] == names[1]) == (one == other)


def test_every_setting_shows_but_those_of_where(tmp_path):
    shown = set(settings_of(load_job(tiny_job(tmp_path, ["python"]))))
    assert {"seed", "train.peak_lr", "data.corpus", "evaluate.sequences", "drop.method", "task.kind"} <= shown
    assert not {key for key in shown if key.startswith(tuple(f"{one}." for one in WHERE)) or key in WHERE}


def test_a_password_does_not_show_and_does_not_count(tmp_path):
    jobs = [load_job(tiny_job(tmp_path, [f"s3://user:{word}@store/x.jsonl"])) for word in ("secret1", "secret2")]
    assert settings_of(jobs[0]) == settings_of(jobs[1])
    assert "secret1" not in str(settings_of(jobs[0]))


def test_explain_says_which_keys_make_two_jobs_different_runs(tmp_path, capsys):
    one = tiny_job(tmp_path, ["python"]).rename(tmp_path / "one.yaml")
    other = tiny_job(tmp_path, ["python"], train={"peak_lr": 2e-3}, scaling={"cpus_per_worker": 2})
    main(["sweep", "explain", str(one), str(other), "--json"])
    assert json.loads(capsys.readouterr().out)["differences"] == {"train.peak_lr": ["0.001", "0.002"]}
    main(["sweep", "explain", str(one), str(one)])
    assert capsys.readouterr().out.startswith("the same run: ")


# --- budgets ---

MEASURES = ["layer_tokens", "flops", "tokens", "gpu_hours"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(measure=st.sampled_from(MEASURES), times=st.floats(0.02, 40), dropping=st.booleans(), begin=st.integers(1, 300))
def test_a_run_within_a_budget_is_as_long_as_it_can_be(tmp_path, measure, times, dropping, begin):
    drop = {**DROPS, "schedule": {"kind": "linear", "start": 8, "until": "70%", "increment": 8}} if dropping else {}
    train = {"length": f"{begin} steps"}
    job = load_job(tiny_job(tmp_path, ["x"], train=train, drop=drop, scaling={"profile": "a100-40g-8"}))
    fifty = replace(job, train=replace(job.train, length=Duration.parse("50 steps")))
    amount = times * cost_of(fifty, measure)
    found = within(job, measure, amount)
    longer = replace(found, train=replace(found.train, length=Duration.parse(f"{found.steps + 1} steps")))
    assert cost_of(found, measure) <= amount < cost_of(longer, measure)


def test_arms_of_one_budget_take_the_same(tmp_path):
    axes = {"drop": [{"method": "none"}, DROPS]}
    full, dropped = trials_of(write_sweep(tmp_path, axes=axes, budget={"equal": "layer_tokens"}))
    assert (full.config.steps, dropped.config.steps) == (2, 2)  # a step of one is 256 layer tokens, of the other 192
    full, dropped = trials_of(write_sweep(tmp_path, axes=axes, budget={"equal": "layer_tokens", "amounts": [7680]}))
    assert (full.config.steps, dropped.config.steps) == (30, 40)
    assert full.plan.layer_tokens(30) == dropped.plan.layer_tokens(40) == 7680


def test_each_arm_is_trained_with_each_budget(tmp_path, capsys):
    budget = {"equal": "tokens", "amounts": [1280, 2560]}
    path = write_sweep(tmp_path, axes={"train.peak_lr": [1e-3, 2e-3]}, budget=budget, seeds=2)
    found = [(dict(one.point), one.config.seed, one.config.steps) for one in trials_of(path)]
    assert found == [
        ({"train.peak_lr": rate, "budget": amount}, seed, steps)
        for seed in (1234, 1235)
        for rate in (1e-3, 2e-3)
        for amount, steps in ((1280, 10), (2560, 20))
    ]
    main(["sweep", str(path), "--dry-run"])
    assert "Lengths by budget: equal tokens, at most 0.00% apart." in capsys.readouterr().out


# --- what is wrong ---

MISTAKES = {
    "an unknown key": ({"axes": {"train.peak_rl": [1]}}, "train.peak_rl: unknown key; did you mean 'train.peak_lr'?"),
    "an empty grid": ({"axes": {"train.peak_lr": []}}, "axes.train.peak_lr.values: want at least one value"),
    "no axes": ({"axes": {}}, "axes: want at least one key with its values, or several seeds"),
    "a wrong value": ({"axes": {"model.layers": [2, "many"]}}, "trial (layers many): "),
    "one run twice": ({"axes": {"train.peak_lr": [1e-3, 0.001]}}, "axes: two trials are the same run: "),
    "an axis that no trial has": (
        {"axes": {"train.peak_lr": {"kind": "grid", "values": [1], "when": {"drop.metod": "none"}}}, "seeds": 2},
        "axes.train.peak_lr: no trial has it; want a 'when' that",
    ),
    "one arm against itself": (
        {
            "seeds": 2,
            "claim": {"arm": {"train.peak_lr": 1e-3}, "against": {"train.peak_lr": 0.001}},
            "axes": {"train.peak_lr": [1e-3, 2e-3]},
        },
        "claim: arm and against are the same arm; want two",
    ),
    "an axis of where": ({"axes": {"scaling.workers": [1, 2]}}, "'scaling.workers' says where a trial runs"),
    "seeds as an axis": ({"axes": {"seed": [1, 2]}}, "the seeds of runs are no axis; want seeds: [1, 2, 3]"),
    "a seed twice": ({"seeds": [1, 1]}, "seeds: want each seed once"),
    "less than no seeds": ({"seeds": -1}, "seeds: want 1 to 1,000 of them, got -1"),
    "no number of seeds": ({"seeds": 0}, "seeds: want 1 to 1,000 of them, got 0"),
    "no list of seeds": ({"seeds": []}, "seeds: want 1 to 1,000 of them, got 0"),
    "no seeds of a claim": (
        {"seeds": [], "claim": {"arm": {"a": 1}, "against": {"a": 2}}},
        "seeds: want 1 to 1,000 of them, got 0",
    ),
    "one seed in a list, and no axes": ({"seeds": [3], "axes": {}}, "axes: want at least one key with its values"),
    "samples of nothing": ({"samples": 3}, "samples: no axis is drawn"),
    "a kind of axis": ({"axes": {"train.peak_lr": {"kind": "gird", "values": [1]}}}, "did you mean 'grid'?"),
    "bounds": ({"axes": {"train.peak_lr": {"kind": "uniform", "low": 2, "high": 1}}}, "high: want more than low, 2"),
    "a log of 0": (
        {"axes": {"train.peak_lr": {"kind": "log_uniform", "low": 0, "high": 1}}},
        "low: want a number above",
    ),
    "an unknown figure": ({"metric": "accuracy"}, "metric: want a figure of validation, such as val_loss"),
    "no direction": ({"metric": "val_accuracy"}, "direction: want min or max, for the metric val_accuracy"),
    "too many": ({"axes": {"seed_": [1]}, "seeds": 1000, "samples": 1}, "seed_: unknown key; did you mean 'seed'?"),
    "ten thousand": (
        {"axes": {"train.peak_lr": [*range(1, 101)], "train.final_lr": [*range(1, 101)]}},
        "10,000 trials; want fewer, or --yes to plan more than 1,000",
    ),
    "a budget and a length": (
        {"budget": {"equal": "flops", "amounts": [1e9]}, "set": {"train.length": "3 steps"}},
        "set: the lengths of runs follow from budget",
    ),
    "a budget of nothing": ({"budget": {"equal": "flops", "amounts": [0]}}, "budget.amounts: want numbers above 0"),
    "less than a step": ({"budget": {"equal": "tokens", "amounts": [5]}}, "5 tokens are less than one step takes, 128"),
    "no profile": ({"budget": {"equal": "gpu_hours"}}, "scaling.profile: equal GPU-hours want a device profile"),
    "a budget of what": ({"budget": {"equal": "time"}}, "budget.equal: want one of layer_tokens, flops, tokens"),
    "a searcher": ({"searcher": {"kind": "optuna"}}, "searcher.arms: this key is needed"),
    "nothing to search": ({"searcher": {"arms": 2}, "axes": {}, "seeds": 2}, "axes: a searcher wants at least one key"),
    "searched budgets": (
        {"searcher": {"arms": 2}, "budget": {"equal": "tokens", "amounts": [1e6, 2e6]}},
        "budget.amounts: a searcher compares arms within one budget",
    ),
    "searched samples": (
        {"searcher": {"arms": 2}, "samples": 2, "axes": {"train.peak_lr": RATE}},
        "samples: a searcher draws by itself; want searcher.arms",
    ),
    "a scheduler": ({"scheduler": {"kind": "asah"}}, "scheduler.kind: want one of asha, median"),
    "a scheduler of costs": ({"scheduler": {"kind": "asha"}, "metric": "flops"}, "scheduler: wants a metric of"),
    "an unknown key of the sweep": ({"ax": 1}, "ax: unknown key"),
    "no base": ({"base": "gone.yaml"}, "gone.yaml: can't read this job file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(tmp_path, complaint, mistake):
    keys, expected = MISTAKES[mistake]
    assert expected in complaint("sweep", write_sweep(tmp_path, **keys), "--dry-run")
    assert not (tmp_path / "runs").exists()


def test_what_the_sweep_gives_can_not_be_overridden(tmp_path, complaint):
    said = complaint("sweep", write_sweep(tmp_path), "train.peak_lr=1", "--dry-run")
    assert "the sweep itself gives 'train.peak_lr'" in said


# --- what is printed ---


def test_a_plan_of_a_sweep_has_what_each_trial_takes(tmp_path, capsys):
    path = write_sweep(tmp_path, axes={"drop": [{"method": "none"}, DROPS]})
    main(["sweep", str(path), "--dry-run", "--json", "scaling.profile=a100-40g-8"])
    result = json.loads(capsys.readouterr().out)
    # two steps of four samples of 32 tokens in two layers; with 16 tokens in the second of them
    assert [trial["layer_tokens"] for trial in result["trials"]] == [512, 384]
    assert result["total"]["layer_tokens"] == 896
    assert all(trial["gpu_hours"] > 0 for trial in result["trials"])
    main(["sweep", str(path), "--dry-run"])
    assert "layer tokens" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


SHIPPED = sorted((ROOT / "jobs" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_sweep_can_be_planned(path, capsys):
    main(["sweep", str(path), "--dry-run", "--json"])
    trials = json.loads(capsys.readouterr().out)["trials"]
    is_of_the_paper = path.stem.startswith("paper_")
    assert len(trials) >= (3 if is_of_the_paper else 9)
    assert all("layer_tokens" in trial for trial in trials) or not is_of_the_paper


def test_there_are_shipped_sweeps():
    assert len(SHIPPED) >= 3
