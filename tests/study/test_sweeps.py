"""A sweep on Ray Tune: every trial is trained once, and what fails or is killed costs the others nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from mlflow import MlflowClient
from ray.util import placement_group_table

from corpora import documents, tiny_job, write_corpus
from tokendrop.cli.main import main
from tokendrop.study.record import SweepRecord
from tokendrop.track.audit import audit
from tokendrop.track.journal import MetricsTail
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


def write_sweep(folder: Path, *, job: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A sweep over a tiny job, with its corpus."""
    tiny_job(folder, [write_corpus(folder / "corpus.jsonl", documents(80))], **(job or {}))
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": "job.yaml", "name": "tiny", "most_at_once": 2, **keys}, sort_keys=False))
    return path


def result_of(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """What the command prints with --json."""
    capsys.readouterr()
    try:
        main(["sweep", *map(str, arguments), "--json"])
        ended = 0
    except SystemExit as end:
        ended = end.code
    assert ended == code
    return json.loads(capsys.readouterr().out)


def last_line(capfd: pytest.CaptureFixture[str], path: Path) -> str:
    """What a sweep says when it ends with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(path)])
    assert end.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


def attempts(run: Path) -> list[int]:
    """The steps at which workers of a run began."""
    return [line["attempt_from"] for line in MetricsTail(run).read(limit=-1) if "attempt_from" in line]


def test_every_trial_is_trained_once_in_this_sweep_or_another(tmp_path, ray_cluster, capsys):
    path = write_sweep(tmp_path, axes={"train.peak_lr": [1e-3, 0.1]}, seeds=2, aggregate="median")
    result = result_of(capsys, path)
    losses = [trial["summary"]["val_loss"] for trial in result["trials"]]
    assert [arm["value"] for arm in result["arms"]] == [(losses[0] + losses[2]) / 2, (losses[1] + losses[3]) / 2]
    assert result["arms"][result["best"]]["value"] == min(arm["value"] for arm in result["arms"])
    runs = [tmp_path / "runs" / trial["run"] for trial in result["trials"]]
    assert [attempts(run) for run in runs] == [[0]] * 4
    assert all(audit(run).is_clean for run in runs)
    assert not (tmp_path / "runs" / "sweeps" / "tiny" / "ray").exists()

    assert result_of(capsys, path) == result
    other = write_sweep(tmp_path, axes={"train.peak_lr": [0.1]}, seeds=2, name="other").rename(tmp_path / "other.yaml")
    assert result_of(capsys, other)["trials"][0]["summary"] == result["trials"][1]["summary"]
    assert [attempts(run) for run in runs] == [[0]] * 4


@pytest.mark.long
def test_mlflow_has_a_run_of_the_sweep_beside_those_of_its_trials(tmp_path, ray_cluster, capsys):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    axes = {"train.peak_lr": [1e-3, 0.1]}
    path = write_sweep(tmp_path, job={"track": {"uri": uri, "tags": {"team": "a"}}}, axes=axes).rename(
        tmp_path / "a.yaml"
    )
    result = result_of(capsys, path)
    other = write_sweep(tmp_path, job={"track": {"uri": uri}}, axes={"train.peak_lr": [0.1, 0.2]}, name="other")
    result_of(capsys, other.rename(tmp_path / "other.yaml"))

    client = MlflowClient(uri)
    (experiment,) = (one for one in client.search_experiments() if one.name == "tokendrop")

    def found(text: str) -> dict[str, Any]:
        return {one.info.run_name: one for one in client.search_runs([experiment.experiment_id], text)}

    sweep = found("tags.`tokendrop.kind` = 'sweep' and tags.`tokendrop.sweep` = 'tiny'")["tiny"]
    assert sweep.info.status == "FINISHED"
    assert sweep.data.metrics["sweep/finished"] == 2
    assert sweep.data.metrics["sweep/best_val_loss"] == result["arms"][result["best"]]["value"]
    assert {one.path for one in client.list_artifacts(sweep.info.run_id)} == {"table.txt", "sweep.json"}
    first, shared = (trial["run"] for trial in result["trials"])
    assert set(found("tags.`tokendrop.sweep` LIKE '%tiny%'")) == {"tiny", first, shared}
    both = found("tags.`tokendrop.sweep` = 'tiny, other'")
    assert [one.data.tags["team"] for one in both.values()] == ["a"]
    assert list(both) == [shared]
    assert "loss/validation" in both[shared].data.metrics
    assert not {"mlflow.parentRunId"} & set(both[shared].data.tags)

    client.update_run(sweep.info.run_id, status="RUNNING")  # as a driver leaves it that dies before it tells the end
    assert result_of(capsys, path)["arms"] == result["arms"]
    assert client.get_run(sweep.info.run_id).info.status == "FINISHED"


def test_trials_of_another_mlflow_do_not_count_as_known_to_this_one(tmp_path, ray_cluster, capsys):
    places = {name: {"track": {"uri": f"sqlite:///{tmp_path}/{name}.db"}} for name in ("one", "other")}
    axes = {"train.peak_lr": [1e-3]}
    for name, place in places.items():
        path = write_sweep(tmp_path, job=place, axes=axes, name=name).rename(tmp_path / f"{name}.yaml")
        (trial,) = result_of(capsys, path)["trials"]
        assert (trial["summary"]["mlflow_run_id"] is None) == (name == "other")
        client = MlflowClient(place["track"]["uri"])
        known = [client.get_experiment_by_name("tokendrop").experiment_id]
        (sweep,) = client.search_runs(known, "tags.`tokendrop.kind` = 'sweep'")
        assert sweep.info.status == "FINISHED"


@pytest.mark.long
def test_a_trial_that_fails_is_told_and_stops_no_other(tmp_path, ray_cluster, capsys):
    path = write_sweep(tmp_path, axes={"model.vocab_size": [320, 257, 384]})
    good, small, blocked = (trial["run"] for trial in result_of(capsys, path, "--dry-run")["trials"])
    obstacle = tmp_path / "runs" / blocked / "plan.json"
    obstacle.mkdir(parents=True)
    result = result_of(capsys, path, code=1)
    failures = {trial["run"]: trial["failure"] for trial in result["trials"]}
    assert failures[good] is None
    assert failures[small].startswith("model.vocab_size: want at least the tokenizer's")
    assert failures[blocked].startswith("IsADirectoryError: ")
    assert [arm["value"] is None for arm in result["arms"]] == [False, True, True]
    assert result["best"] == 0

    obstacle.rmdir()
    assert result_of(capsys, path, code=1) == result
    again = result_of(capsys, path, "--retry-failed", code=1)
    assert again["trials"][:2] == result["trials"][:2]  # one fails again
    assert again["trials"][2]["failure"] is None
    assert [attempts(tmp_path / "runs" / run) for run in (good, blocked)] == [[0], [0]]


@pytest.mark.long
def test_a_metric_that_no_trial_reports_ends_the_sweep(tmp_path, ray_cluster, capfd):
    path = write_sweep(tmp_path, axes={"train.peak_lr": [1e-3, 1e-2]}, metric="val_accuracy", direction="max")
    expected = "tokendrop: metric: no trial reports val_accuracy; want one of val_loss, val_perplexity"
    assert last_line(capfd, path) == expected


def test_two_sweeps_of_one_name_are_told_apart(tmp_path, complaint):
    path = write_sweep(tmp_path, seeds=2)
    with SweepRecord(tmp_path / "runs", "tiny").opened(path, []):
        assert "another process is at work on it" in complaint("sweep", path)
    moved = path.rename(tmp_path / "moved.yaml")
    assert complaint("sweep", moved).endswith(f"is the sweep of {path}; want another name")


def test_what_trials_can_not_do_is_told_before_any_starts(tmp_path, complaint):
    evaluated = write_sweep(tmp_path, job={"evaluate": {"tasks": ["hellaswag"]}}, seeds=2)
    assert complaint("sweep", evaluated).startswith("evaluate.tasks: trials are not evaluated as they train")
    large = write_sweep(tmp_path, axes={"model.width": [32, 2**20]})
    assert re.match(r"trial \(width 1048576, seed 1234\): model: .* want a smaller", complaint("sweep", large))


LONG = {"train": {"length": "60 steps"}, "evaluate": {"every": "5 steps", "sequences": 4}}


def placement_groups() -> list[str]:
    """States of all placement groups that hold something, or want to."""
    return [one["state"] for one in placement_group_table().values() if one["state"] != "REMOVED"]


@pytest.mark.parametrize(
    "scheduler",
    [{"kind": "asha", "grace": 2560, "reduction": 2}, {"kind": "median", "grace": 2560, "least_trials": 1}],
    ids=lambda one: one["kind"],
)
def test_trials_that_fall_behind_are_ended_early_and_not_trained_again(tmp_path, ray_cluster, capsys, scheduler):
    axes = {"train.peak_lr": [1e-2, 1e-7, 1e-8, 1e-9]}  # one at a time: the first one is far better
    path = write_sweep(tmp_path, job=LONG, axes=axes, scheduler=scheduler, most_at_once=1)
    result = result_of(capsys, path)
    first, *others = result["trials"]
    assert first["summary"]["steps"] == 60
    assert first["stopped_early"] is None
    for one in others:
        assert (one["summary"], one["failure"]) == (None, None)
        assert one["stopped_early"]["layer_tokens"] >= 2560
        assert 10 <= committed_step(tmp_path / "runs" / one["run"] / CHECKPOINTS) < 60
        assert audit(tmp_path / "runs" / one["run"]).is_clean
    assert result["best"] == 0
    assert placement_groups() == []
    runs = [tmp_path / "runs" / trial["run"] for trial in result["trials"]]
    assert result_of(capsys, path) == result
    assert [attempts(run) for run in runs] == [[0]] * 4
    more = {"train.peak_lr": [*axes["train.peak_lr"], 1e-10]}
    path = write_sweep(tmp_path, job=LONG, axes=more, scheduler=scheduler, most_at_once=1)
    assert result_of(capsys, path)["trials"][-1]["stopped_early"]  # by those that an earlier start has trained


def test_a_scheduler_without_time_to_compare_is_told(tmp_path, ray_cluster, capfd):
    schedule = {"kind": "linear", "start": 8, "until": "100%", "increment": 8}
    job = {**LONG, "drop": {"method": "random_ltd", "full_length_layers": "first", "schedule": schedule}}
    path = write_sweep(tmp_path, job=job, seeds=2, scheduler={"kind": "asha"}, set={"evaluate.every": "30 steps"})
    assert "scheduler: no trial is validated after a grace of " in last_line(capfd, path)


@pytest.mark.long
def test_a_searcher_chooses_arms_by_those_before(tmp_path, ray_cluster, capsys):
    axes = {"train.peak_lr": {"kind": "log_uniform", "low": 1e-4, "high": 1e-1}, "model.layers": [2, 3]}
    path = write_sweep(tmp_path, axes=axes, searcher={"arms": 4, "startup": 2}, seeds=2)
    result = result_of(capsys, path)
    assert [len(arm["by_seed"]) for arm in result["arms"]] == [2] * 4
    assert len({trial["run"] for trial in result["trials"]}) == 8
    runs = [tmp_path / "runs" / trial["run"] for trial in result["trials"]]
    assert [attempts(run) for run in runs] == [[0]] * 8
    assert result_of(capsys, path) == result
    more = write_sweep(tmp_path, axes=axes, searcher={"arms": 5, "startup": 2}, seeds=2)
    assert result_of(capsys, more)["trials"][:8] == result["trials"]
    assert [attempts(run) for run in runs] == [[0]] * 8


ELASTIC = {"mode": "schedule", "segments": [{"from": "0%", "workers": 1}, {"from": "50%", "workers": 2}]}


@pytest.mark.long
@pytest.mark.parametrize("scaling", [{"workers": 2}, ELASTIC], ids=["2", "1, 2"])
def test_trials_of_several_workers(tmp_path, ray_cluster, capsys, scaling):
    scaled = {f"scaling.{key}": value for key, value in scaling.items()}
    path = write_sweep(tmp_path, set={"train.length": "20 steps", **scaled}, axes={"train.peak_lr": [1e-3, 1e-2]})
    for trial in result_of(capsys, path)["trials"]:
        assert audit(tmp_path / "runs" / trial["run"]).is_clean
        assert trial["summary"]["steps"] == 20
    assert placement_groups() == []


@pytest.mark.long
def test_lengths_in_epochs_and_budgets(tmp_path, ray_cluster, capsys):
    path = write_sweep(tmp_path, axes={"train.length": ["1 epochs", "2 epochs"]})
    one, two = result_of(capsys, path)["trials"]
    assert two["summary"]["steps"] in (2 * one["summary"]["steps"] - 1, 2 * one["summary"]["steps"])
    budget = {"equal": "tokens", "amounts": [256, 512, 1024]}
    path = write_sweep(tmp_path, budget=budget, name="budgets").rename(tmp_path / "budgets.yaml")
    result = result_of(capsys, path)
    assert [trial["summary"]["steps"] for trial in result["trials"]] == [2, 4, 8]
    (frontier,) = result["frontiers"]
    assert frontier["costs"] == [256, 512, 1024]
    assert frontier["values"] == [arm["value"] for arm in result["arms"]]
    assert frontier["law"]["low"] < frontier["law"]["exponent"] < frontier["law"]["high"]


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_sweep_that_was_ended_goes_on_by_the_same_command(tmp_path, ray_cluster, how):
    job = {"train": {"length": "400 steps"}, "checkpoint": {"every": "5 steps"}}
    path = write_sweep(tmp_path, job=job, seeds=2)
    command = [sys.executable, "-m", "tokendrop", "sweep", str(path), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    told = tmp_path / "told.txt"
    with told.open("w") as err, subprocess.Popen(command, env=environment, stdout=err, stderr=err) as first:
        while not any(map(committed_step, (tmp_path / "runs").glob(f"trial-*/{CHECKPOINTS}"))):
            assert first.poll() is None, told.read_text()
            time.sleep(0.05)
        first.send_signal(how)
    assert first.returncode == (-9 if how == signal.SIGKILL else 130)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [tmp_path / "runs" / trial["run"] for trial in json.loads(done.stdout)["trials"]]
    assert all(audit(run).is_clean for run in runs)
    begun = [attempts(run) for run in runs]
    assert any(len(one) == 2 and one[1] > 0 for one in begun), begun


@pytest.mark.long
def test_trials_drop_by_a_file_of_the_users(tmp_path, ray_cluster):
    (tmp_path / "mine.py").write_text((ROOT / "jobs" / "examples" / "every_other_layer.py").read_text())
    drop = {"method": "mine.py:EveryOtherLayer", "schedule": {"kind": "constant", "kept": 8}}
    path = write_sweep(tmp_path, job={"model": {"layers": 4}}, axes={"drop": [drop, {"method": "none"}]}, seeds=2)
    command = [sys.executable, "-m", "tokendrop", "sweep", str(path), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # whose processes run in another folder
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    dropped, whole = 2 * 4 * (3 * 32 + 8), 2 * 4 * 4 * 32
    assert [trial["summary"]["layer_tokens"] for trial in trials] == [dropped, whole] * 2
    for trial in trials[::2]:
        (copy,) = (tmp_path / "runs" / trial["run"] / "own").iterdir()
        assert copy.read_text() == (tmp_path / "mine.py").read_text()
    again = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert json.loads(again.stdout)["trials"] == trials
