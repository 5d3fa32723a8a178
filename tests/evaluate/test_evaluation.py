"""Whole evaluations: held-out loss, the command, and what MLflow is told."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from tokendrop.cli.main import main
from tokendrop.errors import UserError
from tokendrop.evaluate.evaluation import evaluate_run
from tokendrop.evaluate.held_out import held_out_figures, precision_here
from tokendrop.evaluate.load import load_run, locate
from tokendrop.evaluate.suites import SUITES, main_metric
from tokendrop.evaluate.tasks import Evaluation
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.device import autocast
from tokendrop.train.sealed import read_sealed_text, seal_text

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture
def own_run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed; its token shards stay where they are."""
    return shutil.copytree(tiny_run, tmp_path / "own")


def test_held_out_loss_is_the_mean_over_every_token(tiny_run: Path):
    _, data = open_run_folder(tiny_run)
    with pa.ipc.open_file(str(data / "corpus-validation-00000.arrow")) as shard:
        rows = torch.tensor(shard.get_batch(0).column(0).to_pylist())
    model, _, _ = load_run(tiny_run)
    device = torch.device("cpu")
    with torch.no_grad(), autocast(device, precision_here("auto", device)):
        expected = cross_entropy(model.logits(rows[:, :-1]).double().flatten(0, 1), rows[:, 1:].flatten())

    result = held_out_figures(tiny_run)

    assert result["val_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert result["rows"] == len(rows) == 5


def test_no_more_held_out_rows_are_read_than_the_job_says(own_run: Path):
    change_job(own_run, "evaluate", sequences=2)

    assert held_out_figures(own_run)["rows"] == 2


def test_the_command_prints_tasks_and_held_out_loss(tiny_run: Path, documents: Path, capsys):
    command = ["evaluate", str(tiny_run), "--tasks", "tiny_choices", "--include", str(TASKS), "--limit", "4"]

    main(command)
    lines = capsys.readouterr().out.splitlines()
    main([*command, "--json"])
    result = json.loads(capsys.readouterr().out)

    assert lines[0] == result["checkpoint"] == str(locate(tiny_run)[0])
    assert lines[2].split() == ["task", "metric", "value", "stderr"]
    scores, held_out = result["results"]["tiny_choices"], result["validation"]
    assert [line.split() for line in lines[4:]] == [
        ["tiny_choices", "acc", f"{scores['acc']:.4f}", f"{scores['acc_stderr']:.4f}"],
        ["tiny_choices", "acc_norm", f"{scores['acc_norm']:.4f}", f"{scores['acc_norm_stderr']:.4f}"],
        ["validation", "loss", f"{held_out['val_loss']:.4f}"],
        ["validation", "perplexity", f"{held_out['perplexity']:.4f}"],
        ["validation", "word_perplexity", f"{held_out['word_perplexity']:.3e}"],
        ["validation", "rows", f"{held_out['rows']}"],
    ]
    assert held_out == held_out_figures(tiny_run)
    assert result["n_samples"] == {"tiny_choices": 4}


def test_the_users_mistake_ends_the_command_with_one_line_and_2(tiny_run: Path, documents: Path, capsys):
    for wrong in (["nowhere"], [str(tiny_run), "--tasks", "nowhere.yaml"]):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", *wrong])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_its_token_shards_a_run_is_evaluated_on_tasks_alone(own_run: Path, documents: Path, capsys):
    _, tokenizer = read_sealed_text(own_run / "data.txt").splitlines()
    (own_run / "data.txt").write_text(seal_text(f"/nowhere\n{tokenizer}\n"))

    result = evaluate_run(own_run, Evaluation(tasks=["tiny_last_word"], include=TASKS))

    assert result["validation"] is None
    assert set(result["results"]) == {"tiny_last_word"}
    assert "validation left out: /nowhere/manifest.json" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"/nowhere/manifest\.json"):
        evaluate_run(own_run, Evaluation())


def test_results_and_samples_lie_in_the_run_folder_and_where_they_are_asked_for(own_run: Path, documents: Path, capsys):
    output, options = documents / "new" / "result.json", ["--include", str(TASKS), "--limit", "3", "--log-samples"]
    command = ["evaluate", str(own_run), "--tasks", "tiny_choices,tiny_text", *options, "--no-validation", "--json"]
    before = set((own_run / "evaluations").glob("*"))
    for size in ("1", "64"):
        capsys.readouterr()
        main([*command, "--batch-size", size, "--output", str(output)])
    result = json.loads(output.read_text())
    assert result == json.loads(capsys.readouterr().out)
    assert result["validation"] is None
    folders = sorted(set((own_run / "evaluations").iterdir()) - before)
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert len(results) == 2
    for one in results:
        for task, metrics in one["results"].items():
            assert metrics == pytest.approx(result["results"][task], nan_ok=True, rel=1e-4)
    samples = [json.loads(line) for line in (folders[0] / "samples_tiny_choices.jsonl").read_text().splitlines()]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2]
    assert np.mean([sample["acc"] for sample in samples]) == pytest.approx(result["results"]["tiny_choices"]["acc"])


def test_the_papers_suite_is_19_tasks_and_the_mean_of_what_each_is_judged_by(own_run: Path, documents: Path, capsys):
    folder = documents / "suite"
    folder.mkdir(exist_ok=True)
    task = (TASKS / "tiny_choices.yaml").read_text()
    for name in SUITES["paper"]:
        (folder / f"{name}.yaml").write_text(task.replace("task: tiny_choices", f"task: {name}"))
    command = ["evaluate", str(own_run), "--suite", "paper", "--include", str(folder), "--limit", "3"]
    main([*command, "--no-validation", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert len(result["results"]) == len(result["metrics"]) == 19
    assert set(result["metrics"].values()) == {"acc_norm"}
    scores = [scores["acc_norm"] for scores in result["results"].values()]
    assert result["average"] == pytest.approx(np.mean(scores))


def test_a_task_reads_local_documents_in_the_place_of_its_own(own_run: Path, documents: Path, capsys):
    """Those of the splits that are there; a task without a folder there keeps its own."""
    data = documents / "data"
    (data / "tiny_choices").mkdir(parents=True)
    own = (documents / "documents.jsonl").read_text().splitlines(keepends=True)
    (data / "tiny_choices" / "test.jsonl").write_text("".join(own[:5]))
    names = ["--tasks", "tiny_choices,tiny_last_word", "--include", str(TASKS), "--task-data", str(data)]
    main(["evaluate", str(own_run), *names, "--no-validation", "--json"])
    assert json.loads(capsys.readouterr().out)["n_samples"] == {"tiny_choices": 5, "tiny_last_word": 12}


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_several_checkpoints_are_evaluated_side_by_side_as_one_is(tiny_run: Path, own_run: Path, tmp_path, capsys):
    runs = [str(tiny_run), str(locate(own_run)[0])]
    main(["evaluate", *runs, "--json"])
    found = json.loads(capsys.readouterr().out)["evaluations"]
    assert [one["checkpoint"] for one in found] == [str(locate(Path(run))[0]) for run in runs]
    for run, one in zip(runs, found, strict=True):
        main(["evaluate", run, "--json"])
        alone = json.loads(capsys.readouterr().out)
        assert one["validation"] == pytest.approx(alone["validation"], rel=1e-5)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *runs, str(tmp_path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokendrop: {tmp_path}: want a run folder with a committed checkpoint")


@pytest.mark.parametrize("name", ["of_its_own.yaml", "some", "all_of_them"])
def test_files_tags_and_groups_read_local_documents_too(own_run: Path, documents: Path, capsys, name: str):
    """A file goes by its task's name, the tasks of a tag and of a group, also of one within, by theirs."""
    text = (TASKS / "tiny_choices.yaml").read_text().replace("task: tiny_choices", "task: choices\ntag: some")
    (documents / "of_its_own.yaml").write_text(text)
    groups = [{"group": "within", "task": [{"task": "choices"}]}]
    (documents / "all.yaml").write_text(yaml.safe_dump({"group": "all_of_them", "task": groups}))
    data = documents / "data"
    (data / "choices").mkdir(parents=True)
    own = (documents / "documents.jsonl").read_text().splitlines(keepends=True)
    (data / "choices" / "test.jsonl").write_text("".join(own[:5]))
    place = str(documents / name) if name.endswith(".yaml") else name
    names = ["--tasks", place, "--include", str(documents), "--task-data", str(data)]
    main(["evaluate", str(own_run), *names, "--no-validation", "--json"])
    assert json.loads(capsys.readouterr().out)["n_samples"] == {"choices": 5}


def test_local_documents_that_are_not_there_are_told(own_run: Path, documents: Path):
    with pytest.raises(UserError, match=r"^--task-data: nowhere is not a folder; want one that holds TASK/SPLIT"):
        evaluate_run(own_run, Evaluation(tasks=["tiny_choices"], include=TASKS, task_data=Path("nowhere")))
    (documents / "data" / "tiny_choices").mkdir(parents=True)
    (documents / "data" / "tiny_choices" / "train.jsonl").touch()
    with pytest.raises(UserError, match=r"^--task-data: .*/data/tiny_choices has no documents of tiny_choices; want t"):
        evaluate_run(own_run, Evaluation(tasks=["tiny_choices"], include=TASKS, task_data=documents / "data"))


@pytest.mark.parametrize(
    ("scores", "metric"),
    [
        ({"acc": 0.5, "acc_norm": 0.6, "acc_stderr": 0.1}, "acc_norm"),
        ({"exact_match.strict": 0.1, "exact_match_stderr.strict": 0.2}, "exact_match.strict"),
        ({"f1": 0.7, "em": 0.6}, "em"),
        ({"perplexity": 9.0, "acc": 0.3}, "acc"),
        ({"bits_per_byte": 1.0}, None),
    ],
)
def test_a_task_is_judged_by_the_first_of_its_accuracies(scores: dict[str, float | None], metric: str | None):
    assert main_metric(scores) == metric


def test_an_evaluation_of_nothing_or_to_nowhere_is_refused(own_run: Path, complaint):
    assert "--no-validation: want --tasks" in complaint("evaluate", own_run, "--no-validation")
    (own_run / "file").touch()
    for output in (own_run / "file" / "result.json", own_run):
        assert "can't be written" in complaint("evaluate", own_run, "--output", output)


def change_job(run: Path, branch: str, **changes: object) -> None:
    job = yaml.safe_load((run / "job.yaml").read_text())
    job[branch] |= changes
    (run / "job.yaml").write_text(seal_text(yaml.safe_dump(job)))
