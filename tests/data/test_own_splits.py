"""Corpora that bring their own validation and test files, and text that is read line by line."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from corpora import byte_tokenizer, tiny_job
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.corpus.records import RecordForm, read_records
from tokendrop.data.prepare.pipeline import find_corpus, prepare
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.format import Split
from tokendrop.errors import UserError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

S = 16
MODEL = {"sequence_length": S, "vocab_size": 320}
LINES = {name: [f" {name} {n} of the <unk> text \n" * (n % 3 > 0) or "\n" for n in range(200)] for name in "abc"}


def job(folder: Path, **data: object) -> ExperimentConfig:
    for name, lines in LINES.items():
        (folder / f"{name}.txt").write_text("".join(lines))
    data = {"tokenizer": str(byte_tokenizer(folder / "tokenizer.json")), **data}
    return load_job(tiny_job(folder, [folder / "a.txt"], model=MODEL, data=data))


def splits(folder: Path) -> dict[Split, list[int]]:
    """The tokens of each split's rows, one after the other."""
    found: dict[Split, list[int]] = {}
    for split in ("train", "validation", "test"):
        rows = Rows(folder, split)
        found[split] = rows.read(np.arange(rows.committed.rows[0])).flatten().tolist()
    return found


@pytest.mark.parametrize(("unit", "end"), [("line", False), ("stripped_line", False), ("line", True), ("piece", True)])
def test_each_split_is_its_own_file_cut_as_asked(tmp_path: Path, unit: str, end: bool) -> None:
    held_out = {
        f"{split}_corpus": [str(tmp_path / f"{name}.txt")] for split, name in (("validation", "b"), ("test", "c"))
    }
    config = job(tmp_path, text_unit=unit, end_of_text=end, **held_out)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|endoftext|>")] if end else []
    found = splits(prepare(config))
    for split, name in (("train", "a"), ("validation", "b"), ("test", "c")):
        texts = ["".join(LINES[name])] if unit == "piece" else LINES[name]
        texts = [text.strip() for text in texts] if unit == "stripped_line" else texts
        tokens = [*chain.from_iterable([*tokenizer.encode(text).ids, *ends] for text in texts if text)]
        rows = len(tokens) // (S + 1)
        assert rows > 10
        assert found[split] == tokens[: rows * (S + 1)]
        read = tokenizer.decode(found[split], skip_special_tokens=False).replace("<|endoftext|>", "")
        assert "".join(texts).startswith(read)
        assert "<unk>" in read


def test_a_tokenizer_is_learned_from_what_is_trained_on_alone(tmp_path: Path) -> None:
    learned: list[str] = []
    for name in ("b", "other"):
        (tmp_path / "other.txt").write_text("quite other words " * 100)
        held_out = [str(tmp_path / f"{name}.txt")]
        config = job(tmp_path, tokenizer=None, tokenizer_vocab_size=300, validation_corpus=held_out)
        learned.append((prepare(config) / "tokenizer.json").read_text())
    assert learned[0] == learned[1]


def test_lines_go_on_from_any_place(tmp_path: Path) -> None:
    config = job(tmp_path, text_unit="line")
    (file,) = find_corpus(config).files
    form = _form(config)
    every = list(read_records(file, form))
    assert [record.text for record in every] == LINES["a"]
    assert list(read_records(file, form, after=77)) == every[77:]


def _form(config: ExperimentConfig) -> RecordForm:
    return RecordForm.of(config.data, config.data.mixture[0])


def test_held_out_files_that_are_not_there_or_too_short_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.validation_corpus: no such file"):
        prepare(job(tmp_path, validation_corpus=[str(tmp_path / "none.txt")]))
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(UserError, match=r"^data\.validation_corpus: its documents make no row of 17 tokens"):
        prepare(job(tmp_path, validation_corpus=[str(tmp_path / "short.txt")]))
    with pytest.raises(UserError, match=r"^data\.test_corpus: its documents make no row of 17 tokens"):
        prepare(job(tmp_path, test_corpus=[str(tmp_path / "short.txt")]))
    sources = [{"name": "a", "corpus": ["a.txt"], "weight": 1}]
    with pytest.raises(UserError, match=r"data\.validation_corpus: it goes with corpus, not with sources"):
        job(tmp_path, validation_corpus=["b.txt"], sources=sources, corpus=[])


def test_training_starts_before_all_that_is_trained_on_is_prepared(tmp_path: Path) -> None:
    """Held-out files are read first, however long the others are."""
    config = job(tmp_path, validation_corpus=[str(tmp_path / "b.txt")], test_corpus=[str(tmp_path / "c.txt")])
    assert [Path(file.name).name for file in find_corpus(config).files] == ["b.txt", "c.txt", "a.txt"]


def test_a_file_is_not_both_held_out_and_trained_on(tmp_path: Path) -> None:
    twice = [str(tmp_path / "[ab].txt")]
    with pytest.raises(UserError, match=r"^data\.validation_corpus: .*/a\.txt is in another part of the corpus too"):
        find_corpus(job(tmp_path, validation_corpus=twice))
    with pytest.raises(UserError, match=r"^data\.validation_corpus: .*/b\.txt is in another part of the corpus too"):
        find_corpus(job(tmp_path, validation_corpus=[str(tmp_path / "b.txt")], test_corpus=[str(tmp_path / "b.txt")]))
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"^data\.validation_corpus: .*/link\.txt is in another part of the corpus too"):
        find_corpus(job(tmp_path, validation_corpus=[str(tmp_path / "link.txt")]))
    with pytest.raises(UserError, match=r"data\.test_share: it goes without validation_corpus"):
        job(tmp_path, validation_corpus=twice, test_share=0.1)


def test_other_numbers_of_samples_than_the_job_says_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"^data\.epoch_samples: this corpus makes (\d+) training .* says 7; want data\.epoch_samples=\1$",
    ):
        prepare(job(tmp_path, epoch_samples=7))
