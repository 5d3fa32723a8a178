"""`tokendrop bench elastic`: worker-seconds are what was held, and predictions start from the paper's own hours."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from corpora import documents, tiny_job, write_corpus
from strategies import MEASURED
from tokendrop.bench.elastic import bench_elastic, finish_all, planned, predicted_gpu_days, worker_seconds
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.schedule.scaling import estimate
from tokendrop.track.journal import Journal
from tokendrop.track.run_folder import read_attempts
from tokendrop.train.report import StepReport

STEP_S = 0.25
JOB = Path(__file__).parents[2] / "jobs" / "pretrain" / "elastic.yaml"
PAPER_DAYS = {"350m": (2.59, 2.22), "1.3b": (5.42, 4.03)}  # table 1, on 64 GPUs


def report(step: int, world_size: int) -> StepReport:
    zeros = dict.fromkeys(("loss", "grad_norm", "lr", "flops", "data_time_s"), 0.0)
    counts = {"kept_length": 1, "tokens": step, "layer_tokens": step}
    return StepReport(step=step, val_loss=None, world_size=world_size, step_time_s=STEP_S, **counts, **zeros)


def test_worker_seconds_are_of_steps_and_of_all_that_wait_while_workers_change(tmp_path: Path) -> None:
    for start, world_size in ((0, 1), (2, 4), (4, 2)):
        ranks = [Journal(tmp_path, rank=rank, world_size=world_size, start=start) for rank in range(world_size)]
        for journal in ranks:
            for step in (start + 1, start + 2):
                journal.record(report(step, world_size), [step])
            journal.commit(start + 2)
        ranks[0].pause(start + 2, checkpoint_s=0.5)
    pauses = [one["pause_s"] for one in read_attempts(tmp_path)[1]]
    assert len(pauses) == 2
    assert min(pauses) >= 0.5
    assert worker_seconds(tmp_path) == pytest.approx(STEP_S * 2 * (1 + 4 + 2) + 4 * sum(pauses))


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_of_two_trials_fails_the_other_is_ended(failing: int) -> None:
    commands = ["import time; time.sleep(600)"] * 2
    commands[failing] = "raise SystemExit(3)"
    trials = [subprocess.Popen([sys.executable, "-c", one], stdout=subprocess.PIPE) for one in commands]
    with pytest.raises(subprocess.CalledProcessError) as failed:
        finish_all(trials)
    assert failed.value.returncode == 3
    assert [trial.poll() for trial in trials] == [3 if number == failing else -15 for number in (0, 1)]


def test_trials_that_both_end_well_are_waited_for() -> None:
    trials = [subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE) for _ in range(2)]
    finish_all(trials)
    assert [trial.returncode for trial in trials] == [0, 0]


@pytest.mark.parametrize("within", [1.35, 1.2])
def test_the_plan_is_the_planners_within_its_limit_of_time_and_asks_for_nodes_in_time(
    tmp_path: Path, within: float
) -> None:
    one_size = ["scaling.mode=fixed", "scaling.segments=[]", "scaling.workers=2"]
    profile = replace(MEASURED, resize_s=0.1, checkpoint_bytes_per_s=1e9, node_start_s=7.0)
    overrides = planned(JOB, [], one_size, profile, tmp_path / "measured.yaml", within)
    by_plan, fixed = load_job(JOB, overrides), load_job(JOB, one_size)
    assert by_plan.scaling.profile == profile
    assert by_plan.scaling.lead(by_plan.plan) == 7.0
    ours, theirs = estimate(by_plan.plan, profile), estimate(fixed.plan, profile)
    assert ours.gpu_hours < theirs.gpu_hours
    assert ours.wall_clock_s <= within * theirs.wall_clock_s
    assert by_plan.plan.resizes


@pytest.mark.parametrize("model", PAPER_DAYS)
def test_predictions_start_from_the_papers_days_and_a_plan_takes_no_more(model: str) -> None:
    full, dropping, by_plan = predicted_gpu_days(model)
    assert (full, dropping) == pytest.approx([64 * days for days in PAPER_DAYS[model]], rel=2e-3)
    assert by_plan <= dropping


def test_a_job_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml"):
        bench_elastic(
            tmp_path / "none.yaml", [], within=1.35, resizes=1, stretch=1, brief=False, picture=None, log=print
        )


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_bench_goes_through_all_its_runs(tmp_path: Path) -> None:
    job = tiny_job(
        tmp_path,
        [write_corpus(tmp_path / "corpus.jsonl", documents(60))],
        train={"length": "40 steps"},
        scaling={"mode": "schedule", "segments": [{"from": "0%", "workers": 1}, {"from": "50%", "workers": 2}]},
    )
    command = [sys.executable, "-m", "tokendrop", "bench", "elastic", "--job", job, "--resizes", "2", "--stretch", "10"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert {"worker_seconds_over_fixed", "two_trials_over_fixed"} <= set(figures)
    for change in ("resize", "fast_resize", "restart"):
        assert figures[f"{change}_pause_p95_s"]["median"] > 0
        assert figures[f"{change}_steps_redone"]["median"] == 0
    assert figures["fixed_node_seconds"]["median"] > figures["fixed_worker_seconds"]["median"] > 0


def test_a_process_of_a_bench_that_fails_is_named_in_one_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    def failing(**_: object) -> None:
        subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)

    monkeypatch.setattr("tokendrop.bench.step.bench_step", failing)
    with pytest.raises(SystemExit) as end:
        main(["bench", "step"])
    assert end.value.code == 1
    assert "tokendrop: bench step: a process of it ended with exit code 3: " in capsys.readouterr().err
