"""BERT's tasks on workers that follow the plan and are killed: nothing of it shows in what is trained."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from corpora import tiny_job, write_corpus
from examples import TASKS, example
from pairs import LENGTH, texts, write_vocabulary
from runs import FLOAT64, kill_at, losses
from tokendrop.config.load import load_job
from tokendrop.launch.trainer import run_training
from tokendrop.track.audit import audit
from tokendrop.track.run_folder import read_attempts

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.schedule, pytest.mark.usefixtures("ray_cluster")]

CASES = ["masked_lm", "pairs", "choices"]
LTD = {"kind": "linear", "start": 8, "until": "70%", "increment": 8}
BY_PLAN = (
    "scaling.mode=schedule",
    "scaling.segments=[{from: 0%, workers: 1}, {from: 50%, workers: 2}]",
    "scaling.max_restarts=1",
    "scaling.patience_s=2",
)


def write_examples(path: Path, kind: str) -> Path:
    task = TASKS[kind]
    columns = [*task["texts"], *task.get("choices", []), "label"]
    path.write_text("".join(json.dumps(dict(zip(columns, example(kind, n), strict=True))) + "\n" for n in range(64)))
    return path


def write_job(folder: Path, case: str) -> Path:
    is_pretraining = case == "masked_lm"
    corpus = folder / "corpus.jsonl"
    corpus = write_corpus(corpus, texts(150)) if is_pretraining else write_examples(corpus, case)
    sizes = {"layers": 4, "width": 32, "heads": 2, "sequence_length": LENGTH, "vocab_size": 448}
    held_out = {} if is_pretraining else {"validation_corpus": [str(write_examples(folder / "held_out.jsonl", case))]}
    return tiny_job(
        folder,
        [corpus],
        model={"kind": "bert", **sizes},
        task={"kind": "masked_lm"} if is_pretraining else {"kind": "text_classification", **TASKS[case]},
        data={"corpus": [str(corpus)], "tokenizer": str(write_vocabulary(folder)), **held_out},
        train={"length": "12 steps", "global_batch": 8, "micro_batch": 2, "peak_lr": 1e-3, "precision": "fp64"},
        drop={"method": "none"} if case == "choices" else {"method": "random_ltd", "schedule": LTD},
        checkpoint={"every": "3 steps"},
        evaluate={"every": "6 steps", "sequences": 8},
        scaling={"cpus_per_worker": 1},
    )


@pytest.mark.parametrize("case", CASES)
def test_a_task_of_berts_is_the_same_whatever_happens_to_its_workers(tmp_path: Path, case: str) -> None:
    job = write_job(tmp_path, case)
    shards = f"data.folder={tmp_path}/data"
    alone = run_training(load_job(job, [shards, f"runs_folder={tmp_path}/alone"]))
    killer = threading.Thread(target=kill_at, args=(tmp_path / "by_plan", 8), daemon=True)
    killer.start()
    result = run_training(load_job(job, [shards, f"runs_folder={tmp_path}/by_plan", *BY_PLAN]))
    run = Path(result["run"])
    np.testing.assert_allclose(losses(run), losses(Path(alone["run"])), rtol=FLOAT64)
    _, pauses = read_attempts(run)
    assert [(one["resize_at"], one["from"], one["to"]) for one in pauses][:1] == [(6, 1, 2)]
    assert result["restarts"] == 1
    assert audit(run).is_clean
