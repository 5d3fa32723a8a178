"""The metrics of ReCoRD, which lm-eval expects in transformers."""

import json
from pathlib import Path

import pytest

from tokendrop.evaluate.evaluation import evaluate_run
from tokendrop.evaluate.squad_metrics import compute_exact, compute_f1
from tokendrop.evaluate.tasks import Evaluation

RECORD = {
    "passage": "The Bank of Spain rose.\n@highlight\nIt rose in Madrid.",
    "query": "A rise of the @placeholder",
    "entities": ["Bank of Spain", "Madrid"],
    "answers": ["Bank of Spain"],
    "idx": {"passage": 0, "query": 0},
}


@pytest.mark.parametrize(
    ("gold", "found", "exact", "f1"),
    [
        ("The Bank of Spain!", "bank of  spain", 1, 1.0),
        ("Bank of Spain", "Bank of Italy", 0, 2 / 3),
        ("a b b", "b b b", 0, 2 * 2 / 5),
        ("Madrid", "Rome", 0, 0.0),
        ("the", "", 1, 1.0),
        ("", "Rome", 0, 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(gold: str, found: str, exact: int, f1: float) -> None:
    assert compute_exact(gold, found) == compute_exact(found, gold) == exact
    assert compute_f1(gold, found) == compute_f1(found, gold) == pytest.approx(f1)


def test_record_is_evaluated(tiny_run: Path, tmp_path: Path) -> None:
    """A task of the paper's suite, by lm-eval's own file."""
    (tmp_path / "record").mkdir()
    lines = [{**RECORD, "idx": {"passage": 0, "query": number}} for number in range(6)]
    (tmp_path / "record" / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = evaluate_run(tiny_run, Evaluation(tasks=["record"], task_data=tmp_path, validates=False))
    assert found["results"]["record"]["em"] in (0, 1)
    assert found["n_samples"] == {"record": 6}
