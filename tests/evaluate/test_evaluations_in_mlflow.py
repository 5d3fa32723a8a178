"""What MLflow has of a run's evaluations: numbers by step, versions of tasks, samples."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient

from tokendrop.evaluate.evaluation import evaluate_run
from tokendrop.evaluate.held_out import held_out_figures
from tokendrop.evaluate.tasks import Evaluation
from tokendrop.track.evaluations import HELD_OUT, flat_metrics
from tokendrop.track.journal import METRICS
from tokendrop.track.mlflow import FIGURES, UNSEEN, MlflowMirror
from tokendrop.track.mlflow import METRICS as CURVES
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.sealed import seal_text

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture
def own_run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed, that nothing was evaluated of."""
    run = shutil.copytree(tiny_run, tmp_path / "own")
    shutil.rmtree(run / "evaluations", ignore_errors=True)
    (run / METRICS).touch()
    return run


def tracked_at(run: Path, uri: str) -> MlflowMirror:
    job = yaml.safe_load((run / "job.yaml").read_text())
    job["track"]["uri"] = uri
    (run / "job.yaml").write_text(seal_text(yaml.safe_dump(job)))
    return MlflowMirror(run, open_run_folder(run)[0])


def run_id_of(run: Path) -> str:
    run_id = MlflowMirror(run, open_run_folder(run)[0]).run_id
    assert run_id is not None
    return run_id


def test_mlflow_gets_numbers_versions_and_samples_of_each_evaluation_once(own_run: Path, documents: Path, tmp_path):
    uri = f"sqlite:///{documents}/mlflow.db"
    tracked_at(own_run, uri)
    evaluation = Evaluation(tasks=["tiny_choices"], include=TASKS, limit=4, log_samples=True)

    results = [evaluate_run(own_run, evaluation) for _ in range(2)]
    tracked_at(own_run, uri).sync()

    client, run_id = MlflowClient(tracking_uri=uri), run_id_of(own_run)
    logged = client.get_run(run_id).data
    assert logged.metrics["unseen/tiny_choices_acc"] == results[0]["results"]["tiny_choices"]["acc"]
    assert logged.metrics["unseen/validation_loss"] == pytest.approx(results[0]["validation"]["val_loss"])
    assert logged.metrics["unseen/validation_perplexity"] == pytest.approx(results[0]["validation"]["perplexity"])
    assert "acc_stderr" in results[0]["results"]["tiny_choices"]
    assert not any("stderr" in name for name in logged.metrics)
    assert logged.tags["unseen/tiny_choices_version"] == str(results[0]["versions"]["tiny_choices"]) == "1.0"
    assert [point.step for point in client.get_metric_history(run_id, "unseen/tiny_choices_acc")] == [7, 7]
    folders = client.list_artifacts(run_id, "evaluations")
    assert len(folders) == 2
    for folder in folders:
        files = [Path(file.path).name for file in client.list_artifacts(run_id, folder.path)]
        assert files == ["result.json", "samples_tiny_choices.jsonl"]
    path = client.download_artifacts(run_id, f"{folders[0].path}/samples_tiny_choices.jsonl", str(tmp_path))
    samples = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2, 3]


def test_an_mlflow_that_is_away_costs_one_line_and_gets_it_later(own_run: Path, tiny_run: Path, documents, capsys):
    tracked_at(own_run, "http://127.0.0.1:9")

    result = evaluate_run(own_run, Evaluation())

    assert result["validation"] == held_out_figures(tiny_run)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mlflow   not reached")
    assert f"`tokendrop sync {own_run}` sends" in line

    uri = f"sqlite:///{documents}/mlflow.db"
    tracked_at(own_run, uri).sync()
    logged = MlflowClient(tracking_uri=uri).get_run(run_id_of(own_run)).data.metrics
    assert logged["unseen/validation_loss"] == pytest.approx(result["validation"]["val_loss"])


@given(st.dictionaries(st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True), st.floats(0, 1), min_size=1))
def test_figures_are_sent_and_their_standard_errors_are_not(scores: dict[str, float]) -> None:
    with_errors = (
        scores | {f"{name}_stderr": 0.1 for name in scores} | {f"{name}_stderr.strict": 0.2 for name in scores}
    )
    result = {"results": {"task": with_errors}, **dict.fromkeys(HELD_OUT)}
    assert flat_metrics(result) == {f"task_{name}": value for name, value in scores.items()}


def test_mlflows_page_begins_with_the_loss_and_ends_with_evaluations() -> None:
    curves = {name.partition("/")[0] for name in [*CURVES, f"{FIGURES}/accuracy"]}
    assert sorted({*curves, UNSEEN})[0] == "loss"
    assert sorted({*curves, UNSEEN})[-1] == UNSEEN
