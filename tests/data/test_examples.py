"""Labelled examples: the same rows from every format, as Hugging Face would make them; what is wrong is told."""

import json
import shutil
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import BertTokenizerFast

from corpora import tiny_job
from pairs import PIECES, write_vocabulary
from tokendrop.cli.main import main
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.prepare.cut_examples import note_of_cut
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.read.example_rows import label_as_number, read_examples
from tokendrop.data.read.inspection import find_sample
from tokendrop.data.read.row_reader import Rows
from tokendrop.errors import UserError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

S = 12
LABELS = ["bad", "good"]
FORMATS = ["jsonl", "tsv", "parquet", "arrow"]


def words(number: int, count: int) -> str:
    return " ".join(PIECES[(number * 7 + place) % 5] for place in range(count))


EXAMPLES = [
    {"first": words(n, 1 + n % 15), "second": words(n + 3, n % 9 + 1), "label": LABELS[n % 3 % 2]} for n in range(60)
]


def write(path: Path, examples: Sequence[dict[str, object]]) -> Path:
    """Examples in the format that the file's name says."""
    columns = [*examples[0]]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in examples))
    elif path.suffix == ".tsv":
        lines = [columns, *([str(one[column]) for column in columns] for one in examples)]
        path.write_text("".join("\t".join(line) + "\n" for line in lines))
    else:
        table = pa.table({column: [one[column] for one in examples] for column in columns})
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as sink:
                sink.write_table(table)
    return path


def job(folder: Path, corpus: Path, *, task: dict[str, object] | None = None, **data: object) -> ExperimentConfig:
    task = {"texts": ["first", "second"], "labels": LABELS} if task is None else task
    model = {"kind": "bert", "sequence_length": S, "vocab_size": 512}
    held_out = folder / "held_out"
    held_out.mkdir(exist_ok=True)
    if corpus.exists():
        shutil.copy(corpus, held_out)
    data = {"tokenizer": str(write_vocabulary(folder)), "validation_corpus": [str(held_out / corpus.name)], **data}
    kind = {"kind": "text_classification", **task}
    return load_job(tiny_job(folder, [corpus], model=model, data=data, task=kind))


def rows_of(config: ExperimentConfig) -> np.ndarray:
    rows = Rows(prepare(config), "train")
    return rows.read(np.arange(rows.committed.rows[0]))


@pytest.mark.parametrize("suffix", FORMATS)
def test_rows_are_what_hugging_faces_tokenizer_makes_of_the_examples(tmp_path: Path, suffix: str) -> None:
    config = job(tmp_path, write(tmp_path / f"examples.{suffix}", EXAMPLES))
    found = read_examples(rows_of(config), S)
    theirs = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    texts = [[one[column] for one in EXAMPLES] for column in ("first", "second")]
    expected = theirs(*texts, truncation=True, max_length=S, padding="max_length", return_tensors="np")
    assert np.array_equal(found.input_ids_BCS[:, 0], expected["input_ids"])
    assert np.array_equal(found.token_types_BCS[:, 0], expected["token_type_ids"])
    assert np.array_equal(found.attention_mask_BCS[:, 0], expected["attention_mask"])
    assert [LABELS[label] for label in found.labels_B] == [one["label"] for one in EXAMPLES]


def test_examples_that_fill_their_sequence_are_counted(tmp_path: Path) -> None:
    folder = prepare(job(tmp_path, write(tmp_path / "examples.jsonl", EXAMPLES)))
    texts = [[one[column] for one in EXAMPLES] for column in ("first", "second")]
    full = sum(len(ids) >= S for ids in BertTokenizerFast(str(tmp_path / "vocab.txt"))(*texts)["input_ids"])
    assert 0 < full < len(EXAMPLES)
    # the same examples are held out, too
    said = f"{2 * full} of {2 * len(EXAMPLES)} examples fill model.sequence_length={S} tokens, and what was longer"
    assert said in str(note_of_cut(folder))


def test_preparation_says_that_examples_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, write(tmp_path / "examples.jsonl", EXAMPLES))
    main(["prepare", str(tmp_path / "job.yaml")])
    said = capsys.readouterr().err
    assert said.count("note     data.corpus: ") == 1
    assert f" examples fill model.sequence_length={S} tokens, and what was longer is cut; want" in said


def test_of_examples_that_all_fit_nothing_is_said(tmp_path: Path) -> None:
    short = [{"first": "a", "second": "b", "label": LABELS[n % 2]} for n in range(20)]
    assert note_of_cut(prepare(job(tmp_path, write(tmp_path / "examples.jsonl", short)))) is None


def test_a_look_at_a_sample_shows_its_texts(tmp_path: Path) -> None:
    folder = prepare(job(tmp_path, write(tmp_path / "examples.jsonl", EXAMPLES)))
    sample = find_sample(folder, 3, "train")
    assert sample.text == f"[CLS] {EXAMPLES[3]['first']} [SEP] {EXAMPLES[3]['second']} [SEP]"
    assert sample.documents[0].record == 4


def test_a_table_without_a_header_has_numbers_for_columns(tmp_path: Path) -> None:
    (tmp_path / "cola.tsv").write_text("".join(f"gj04\t{n % 2}\t*\t{words(n, 5)}\n" for n in range(30)))
    task = {"texts": ["3"], "label": "1", "labels": ["0", "1"], "metrics": ["matthews_correlation"]}
    found = read_examples(rows_of(job(tmp_path, tmp_path / "cola.tsv", task=task, tsv_header=False)), S)
    assert found.labels_B.tolist() == [n % 2 for n in range(30)]
    assert not found.token_types_BCS.any()


def test_numbers_and_choices(tmp_path: Path) -> None:
    numbers = [{"first": "a b", "second": "c", "label": n / 8} for n in range(20)]
    task = {"texts": ["first", "second"], "metrics": ["pearson"]}
    config = job(tmp_path, write(tmp_path / "numbers.parquet", numbers), task=task)
    found = read_examples(rows_of(config), S)
    assert label_as_number(found.labels_B).tolist() == pytest.approx([one["label"] for one in numbers])

    race = [
        {"article": words(n, 4), "question": "e e", "options": [*"abcd"], "answer": "ABCD"[n % 4]} for n in range(9)
    ]
    config = job(tmp_path, write(tmp_path / "race.jsonl", race), task={"preset": "race"})
    found = read_examples(rows_of(config), S)
    theirs = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    expected = theirs(
        [one["article"] for one in race for _ in range(4)],
        [f"e e {option}" for one in race for option in one["options"]],
        **{"truncation": True, "max_length": S, "padding": "max_length", "return_tensors": "np"},
    )
    assert np.array_equal(found.input_ids_BCS.reshape(-1, S), expected["input_ids"])
    assert found.labels_B.tolist() == [n % 4 for n in range(9)]


GOOD = EXAMPLES[0]
NUMBER = {"texts": ["first"], "metrics": ["pearson"]}
CHOICES = {"texts": ["first"], "choices": ["second"], "labels": LABELS}
WRONG = {
    "label": ({**GOOD, "label": "fine"}, None, r"want a label of bad, good, got 'fine'"),
    "number": ({**GOOD, "label": "61"}, NUMBER, r"want a label from 0 to 60, got '61'"),
    "text": ({**GOOD, "first": 7}, None, r"want a text, got 7"),
    "missing": ({**GOOD, "second": None}, None, r"want a value in 'second', got nothing"),
    "empty choice": ({**GOOD, "second": ["a", " "]}, CHOICES, r"choice 1 is empty"),
    "few choices": ({**GOOD, "second": ["a"]}, CHOICES, r"want 2 choices, got 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_example_that_is_none_is_named_by_its_line(tmp_path: Path, case: str) -> None:
    wrong, task, said = WRONG[case]
    good = {**GOOD, **({"label": "3"} if task is NUMBER else {"second": ["a", "b"]} if task is CHOICES else {})}
    corpus = write(tmp_path / "wrong.jsonl", [good] * 20 + [wrong])
    with pytest.raises(UserError, match=rf"wrong\.jsonl:21: {said}"):
        prepare(job(tmp_path, corpus, task=task))
    assert len(rows_of(job(tmp_path, corpus, task=task, max_rejected=0.1))) == 20


@pytest.mark.parametrize("wrong", [Decimal("1.5"), date(2020, 1, 1), [b"\xff"]])
def test_a_value_of_a_table_that_is_no_text_and_no_number_is_rejected(tmp_path: Path, wrong: object) -> None:
    examples = [{"first": "a", "second": wrong, "label": "good"}] * 5
    with pytest.raises(UserError, match=r"wrong\.parquet:1: want text and numbers in first, second, label \("):
        prepare(job(tmp_path, write(tmp_path / "wrong.parquet", examples)))


def test_wrong_tables_and_jobs_are_told(tmp_path: Path) -> None:
    corpus = write(tmp_path / "examples.tsv", EXAMPLES)
    with pytest.raises(UserError, match=r"no column 'third' \(of task\), it has first, second, label"):
        prepare(job(tmp_path, corpus, task={"texts": ["first", "third"], "labels": LABELS}))
    with (tmp_path / "short.tsv").open("w") as out:
        out.write("first\tsecond\tlabel\n" + "a\tb\tgood\n" * 30 + "a\tgood\n")
    with pytest.raises(UserError, match=r"short\.tsv:32: want 3 values between tabs, got 2"):
        prepare(job(tmp_path, tmp_path / "short.tsv"))
    with pytest.raises(UserError, match=r"data\.tokenizer: want the one of the model"):
        prepare(job(tmp_path, corpus, tokenizer=None))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"texts": []}, r"task\.texts: want one column or two, got 0"),
        ({"texts": ["a"], "labels": ["x"]}, r"task\.labels: want several that differ"),
        ({"texts": ["a"], "choices": ["b"]}, r"task\.choices: want a column for each of 0 labels"),
        ({"texts": ["a"], "labels": LABELS, "metrics": ["pearson"]}, r"task\.metrics: want those of labels"),
        ({"texts": ["a"], "labels": [*"abc"], "metrics": ["f1"]}, r"task\.metrics: f1 wants two labels, got 3"),
        ({"preset": "wnli"}, r"task\.preset: want one of mnli, "),
    ],
)
def test_a_task_that_can_not_be_is_refused(tmp_path: Path, task: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        job(tmp_path, tmp_path / "none.jsonl", task=task)


def test_methods_that_want_losses_of_tokens_are_refused(tmp_path: Path) -> None:
    config = job(tmp_path, write(tmp_path / "examples.jsonl", EXAMPLES))
    for method in ("token_bypass", "sequence_warmup"):
        with pytest.raises(UserError, match=rf"drop\.method: '{method}' wants a task with a loss of each token"):
            load_job(tmp_path / "job.yaml", [f"drop={{method: {method}, schedule: {{kind: constant, kept: 4}}}}"])
    assert config.task.columns == ("first", "second", "label")
