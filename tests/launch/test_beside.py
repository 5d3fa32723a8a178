"""Tasks of lm-eval on checkpoints while a run trains: what is evaluated, and that training knows nothing of it."""

import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runs import FLOAT64, config_of, losses, write_job
from tokendrop.cli.main import main
from tokendrop.config.run import EvaluateConfig
from tokendrop.errors import UserError
from tokendrop.evaluate.beside import run_in_idle_time
from tokendrop.launch.beside import CheckpointEvaluation
from tokendrop.launch.stored import check_store
from tokendrop.launch.trainer import run_training
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, step_name

ENDS_WITHIN_S = 10

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {documents}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("beside"))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    rows = [{"text": f"word{n} word{n + 1}", "choices": ["word1", "word2"], "answer": n % 2} for n in range(6)]
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "words.yaml"
    path.write_text(TASK.format(name="words", documents=documents))
    return path


def evaluated(run: Path) -> dict[int, dict[str, float]]:
    results = [json.loads(path.read_text()) for path in (run / "evaluations").glob("*/result.json")]
    assert len({result["step"] for result in results}) == len(results)
    return {result["step"]: result["results"]["words"] for result in results}


def following(job: Path, run: Path, steps: list[int], **changes: object) -> CheckpointEvaluation:
    for step in steps:
        (run / CHECKPOINTS / step_name(step)).mkdir(parents=True)
    config = config_of(job)
    config = replace(config, evaluate=replace(config.evaluate, **changes))
    return CheckpointEvaluation(run, config, lambda checkpoint, wanted: "")


@given(st.sets(st.integers(1, 12)), st.integers(0, 12), st.integers(1, 12))
@example({6, 12}, 6, 12)
def test_the_newest_checkpoint_is_due_after_so_many_steps_and_the_last_always(
    tmp_path_factory, job, steps, seen, every
):
    run = tmp_path_factory.mktemp("run")
    tasks_every = type(EvaluateConfig().every).parse(f"{every} steps")
    follower = following(job, run, sorted(steps), tasks_every=tasks_every)
    follower._seen = seen

    due = follower.due()

    newest = max(steps, default=0)
    assert (due is not None) == (newest > seen and (newest - seen >= every or newest == 12))
    assert due is None or due.name == step_name(newest)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_checkpoints_are_evaluated_beside_training_which_is_as_without(job: Path, task: Path, capfd):
    main(
        [
            "train",
            *command(job, "run=beside", f"evaluate.tasks=[{task}]", "checkpoint.keep=1"),
            "evaluate.log_samples=true",
            "--json",
        ]
    )
    out, err = capfd.readouterr()
    run = Path(json.loads(out)["run"])
    plain = Path(run_training(config_of(job, "run=plain"))["run"])

    found = evaluated(run)
    assert 12 in found
    assert set(found) <= {3, 6, 9, 12}
    assert f"evaluate step 12: words acc {found[12]['acc']:.4f}\n" in err
    assert losses(run) == pytest.approx(losses(plain), abs=FLOAT64)
    for result in (run / "evaluations").glob("*/result.json"):
        assert len((result.parent / "samples_words.jsonl").read_text().splitlines()) == 6
    assert [path.name for path in committed(run / CHECKPOINTS)] == [step_name(12)]
    main(["evaluate", str(run), "--tasks", str(task), "--no-validation", "--json"])
    assert json.loads(capfd.readouterr().out)["results"]["words"] == found[12]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_an_evaluation_that_raises_costs_a_line(job: Path, tmp_path: Path, capfd):
    def evaluate(checkpoint: Path, wanted: EvaluateConfig) -> str:
        raise ValueError("no such answer")

    follower = following(job, tmp_path, [12])
    follower.evaluate = evaluate
    with follower:
        pass
    assert "evaluate step 12: left out (no such answer)\n" in capfd.readouterr().err


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("is_over", [True, False])
def test_an_evaluation_that_hangs_is_left_out_at_ctrl_c(job: Path, tmp_path: Path, capfd, is_over: bool):
    """After training, which has ended well, or within it."""
    began = tmp_path / "began"

    def evaluate(checkpoint: Path, wanted: EvaluateConfig) -> str:
        began.touch()
        time.sleep(600)
        return ""

    def press_when_it_hangs() -> None:
        while not began.exists():
            time.sleep(0.05)
        pressed_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    pressed_at: list[float] = []
    follower = following(job, tmp_path, [12])
    follower.evaluate = evaluate
    threading.Thread(target=press_when_it_hangs, daemon=True).start()
    with nullcontext() if is_over else pytest.raises(KeyboardInterrupt), follower:
        if not is_over:
            time.sleep(120)
    assert time.monotonic() - pressed_at[0] < ENDS_WITHIN_S
    follower._thread.join(ENDS_WITHIN_S)
    assert not follower._thread.is_alive()
    assert ("evaluate left out; `tokendrop evaluate` catches up on it" in capfd.readouterr().err) == is_over


def test_a_task_that_can_not_be_loaded_is_told_before_anything_starts(job: Path, complaint):
    assert "there is no task file /nowhere/words.yaml" in complaint(
        "train", *command(job, "evaluate.tasks=[/nowhere/words.yaml]")
    )
    assert "evaluate: want limit of at least 1, got 0" in complaint("train", *command(job, "evaluate.limit=0"))


def test_idle_time_is_the_lowest_priority_there_is():
    child = os.fork()
    if child == 0:
        run_in_idle_time()
        os._exit(os.nice(0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 19


def command(job: Path, *overrides: str) -> list[str]:
    return [str(job), f"runs_folder={job.parent}/runs", f"data.folder={job.parent}/data", *overrides]


def test_tasks_are_not_evaluated_beside_a_run_that_a_store_keeps(tmp_path: Path) -> None:
    config = config_of(write_job(tmp_path), "runs_folder=s3://bucket/runs", "evaluate.tasks=[piqa]")
    with pytest.raises(UserError, match=r"^evaluate\.tasks: a run that a store keeps is evaluated once it is trained"):
        check_store(config, None)


def test_tasks_are_evaluated_beside_a_run_in_its_folder_whatever_its_job_says_of_new_ones(tmp_path: Path) -> None:
    config = config_of(write_job(tmp_path), "runs_folder=s3://bucket/runs", "evaluate.tasks=[piqa]")
    (tmp_path / "run").mkdir()
    check_store(config, tmp_path / "run")
