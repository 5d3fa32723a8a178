"""Folders of labelled examples, without Ray."""

import json
import random
from pathlib import Path

import numpy as np

from pairs import LENGTH, text, write_shards, write_tokenizer
from tokendrop.config.load import build
from tokendrop.config.task import TextClassification
from tokendrop.data.prepare.examples import ExampleForm, example_rows
from tokendrop.data.prepare.pack import Documents, Packer
from tokendrop.data.shards.format import TOKENIZER

TASKS = {
    "pairs": {"texts": ["first", "second"], "labels": ["no", "maybe", "yes"]},
    "number": {"texts": ["first"], "metrics": ["pearson", "spearman"]},
    "choices": {"texts": ["first"], "choices": ["a", "b", "c"], "labels": ["0", "1", "2"]},
}
"""The branch `task` of jobs, less its kind."""


def example(kind: str, seed: int) -> list[str]:
    """The values of an example's columns, the label last; it says something of the first text."""
    chance = random.Random(seed)
    task = TASKS[kind]
    values = [text(chance.randrange(10**6), sentences=1) for _ in [*task["texts"], *task.get("choices", [])]]
    answer = len(values[0]) % 3
    return [*values, task["labels"][answer] if "labels" in task else f"{answer / 2:.2f}"]


def write_examples(folder: Path, kind: str, count: int) -> None:
    """Examples as training rows, and the same again as validation rows."""
    tokenizer = write_tokenizer(folder)
    task = build(TextClassification, {"kind": "text_classification", **TASKS[kind]}, "task")
    form = ExampleForm.of(task, LENGTH)
    lines = [json.dumps(example(kind, seed)) for seed in range(count)]
    rows, reasons = example_rows((folder / TOKENIZER).read_text(), lines, form)
    assert not any(reasons)
    packer = Packer(form.row_length)
    packer.add(
        Documents(
            tokens_N=np.concatenate(rows).astype(np.uint16),
            lengths_D=np.full(count, form.row_length, np.int64),
            subsets_D=[""] * count,
            files_D=np.arange(count) // 5,
            records_D=1 + np.arange(count) % 5,
            seen_D=np.arange(count),
            bytes_D=np.full(count, 100),
        )
    )
    write_shards(folder, packer, tokenizer, kind="examples", row_length=form.row_length, documents=count)
