"""What the user wrote is wrong: a command says where in one line, and leaves nothing behind."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer, models

from corpora import byte_tokenizer, documents, json_lines, tiny_job, write_corpus
from runs import left_behind
from tokendrop.cli.main import main

GOOD = json_lines(documents(80))


@pytest.fixture
def job(tmp_path) -> Path:
    """A job that would train on a good corpus."""
    return tiny_job(tmp_path, [write_corpus(tmp_path / "good.jsonl", documents(80))])


# --- the job ---

JOB_MISTAKES = {
    "train.globl_batch=4": r"job\.yaml: train\.globl_batch: unknown key; did you mean 'train\.global_batch'\?",
    "model.width=wide": r"model\.width: want a whole number, got 'wide'",
    "data.corpus=good.jsonl": r"data\.corpus: want a list, got 'good\.jsonl'",
    "data.corpus=[]": r"data: want either corpus, with at least one file",
    "data.validation_share=1.5": r"want 0 < validation_share < 1 .*, got 1\.5 and 0",
    "drop={method: random_ltd, schedule: {kind: constant, kept: 64}}": r"drop\.schedule: .*64.*32",
    "train.micro_batch=3": r"global batch 4 must be a multiple of micro batch 3",
    "model.width=1048576": r"model: 26\.4T parameters .* want 422TB of memory for 1 workers, this machine has",
    "scaling.workers=3": r"global batch 4 must be a multiple of micro batch 2 x 3 workers",
    "model.kind=bert": r"task\.kind: 'causal_lm' trains a model of kind gpt, not 'bert'",
}


@pytest.mark.parametrize("override", JOB_MISTAKES)
def test_a_mistake_in_a_job_is_named_by_its_key(tmp_path, job, complaint, override):
    assert re.search(JOB_MISTAKES[override], complaint("train", job, override))
    assert left_behind(tmp_path) == []


def test_a_strategy_whose_library_is_not_installed_says_how_to_get_it(tmp_path, job, complaint, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as where it is not installed
    said = complaint("train", job, "train.strategy=deepspeed")
    assert said.startswith("train.strategy: DeepSpeed is not installed here; want pip install 'tokendrop[deepspeed]'")
    assert left_behind(tmp_path) == []


def test_a_kind_of_model_that_does_not_train_yet_can_be_planned(job, capsys):
    main(["plan", str(job), "model.kind=bert", "--json"])
    assert json.loads(capsys.readouterr().out)["steps"] == 2


# --- the corpus ---


def parquet(**columns: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


NO_TEXT = r"data\.corpus: (it holds no text|its documents make no train row of 33 tokens; want more text)"
UNREADABLE = r"data\.corpus: (\d+ of \d+ documents can't be read, .*; the first|it holds no text)[:;] FILE:"
DAMAGED = r"data\.corpus: (it holds no text; FILE:1: damaged|FILE:\d+: damaged .*; want the whole file)"

_MANY = zstandard.compress(json_lines([f"text {number}" for number in range(20_000)]))

CORPUS_MISTAKES: dict[str, tuple[str, bytes, str]] = {
    "an empty file": ("c.jsonl", b"", NO_TEXT),
    "an empty text file": ("c.txt", b"", NO_TEXT),
    "an empty .parquet": ("c.parquet", b"", DAMAGED),
    "an empty .arrow": ("c.arrow", b"", DAMAGED),
    "an empty .gz": ("c.jsonl.gz", b"", DAMAGED),
    "an empty .zst": ("c.jsonl.zst", b"", DAMAGED),
    "blank lines alone": ("c.jsonl", b"\n \n\r\n", NO_TEXT),
    "empty documents alone": ("c.jsonl", json_lines([""] * 500), NO_TEXT),
    "less than a row of text": ("c.txt", b"a few words", NO_TEXT),
    "a .zst cut short": ("c.jsonl.zst", zstandard.compress(GOOD)[:-9], DAMAGED),
    "a large .zst cut short": ("c.jsonl.zst", _MANY + zstandard.compress(GOOD)[:-9], DAMAGED),
    "random bytes named .zst": ("c.jsonl.zst", bytes(range(256)), DAMAGED),
    "random bytes named .gz": ("c.jsonl.gz", bytes(range(256)), DAMAGED),
    "random bytes named .parquet": ("c.parquet", bytes(range(256)), DAMAGED),
    "a line that is not UTF-8": (
        "c.jsonl",
        GOOD + b'{"text": "caf\xe9"}\n',
        UNREADABLE + r"81: not valid UTF-8 at byte 14",
    ),
    "a text that is not UTF-8": ("c.txt", GOOD + b"one\ncaf\xe9\n", UNREADABLE + r"\d+: not valid UTF-8"),
    "a line that is not JSON": ("c.jsonl", GOOD + b"{text: 1}\n" + GOOD, UNREADABLE + "81: not valid JSON"),
    "a line without text": (
        "c.jsonl",
        GOOD + b'{"content": "x"}\n',
        UNREADABLE + "81: want text in 'text', got nothing",
    ),
    "half of a character": ("c.jsonl", GOOD + b'{"text": "\\ud800"}\n', UNREADABLE + r"81: \\ud800 is half of"),
    "a Parquet file without the column": (
        "c.parquet",
        parquet(content=["a"], url=["b"]),
        r"FILE: no column 'text' \(data\.text_key\), it has content, url",
    ),
}


@pytest.mark.ray
@pytest.mark.parametrize("learned", [True, False], ids=["learned vocabulary", "given tokenizer"])
@pytest.mark.parametrize("mistake", CORPUS_MISTAKES)
def test_a_mistake_in_a_corpus_is_named_by_its_file(tmp_path, ray_cluster, complaint, mistake, learned):
    name, content, expected = CORPUS_MISTAKES[mistake]
    corpus = tmp_path / name
    corpus.write_bytes(content)
    tokenizer = None if learned else str(byte_tokenizer(tmp_path / "tokenizer.json"))
    job = tiny_job(tmp_path, [corpus], data={"tokenizer": tokenizer})
    assert re.match(expected.replace("FILE", re.escape(str(corpus))), complaint("train", job))
    assert left_behind(tmp_path) == []


@pytest.mark.ray
@pytest.mark.parametrize("entry", ["missing.jsonl", "*.parquet", "nothing://x/y.jsonl", "notes.md"])
def test_a_corpus_that_is_not_there_is_named(tmp_path, ray_cluster, complaint, entry):
    (tmp_path / "notes.md").write_text("notes")
    path = entry if "://" in entry else str(tmp_path / entry)
    said = complaint("train", tiny_job(tmp_path, [path]))
    assert said.startswith("data.corpus: ")
    assert path in said
    assert left_behind(tmp_path) == []


@pytest.mark.ray
@pytest.mark.parametrize(("share", "split", "remedy"), [(1e-6, "validation", "more"), (0.999999, "train", "less")])
def test_a_split_without_a_row_says_which_way_to_turn_the_share(
    tmp_path, ray_cluster, job, complaint, share, split, remedy
):
    said = complaint("train", job, f"data.validation_share={share}")
    assert re.search(rf"its documents make no {split} row of 33 tokens; .* data\.validation_share {remedy} than", said)
    assert left_behind(tmp_path) == []


# --- the tokenizer ---


def words_alone(path: Path) -> None:
    """A tokenizer that knows two words and has nothing for the others."""
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "of": 1}, unk_token="none"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


TOKENIZER_MISTAKES = {
    "missing": (lambda path: None, r"data\.tokenizer: can't read FILE \(No such file"),
    "a folder": (Path.mkdir, r"data\.tokenizer: can't read FILE \(Is a directory"),
    "empty": (
        lambda path: path.write_text(""),
        r"data\.tokenizer: can't read FILE \(.*; want a tokenizer\.json",
    ),
    "garbage": (lambda path: path.write_bytes(bytes(range(256))), r"data\.tokenizer: can't read FILE \("),
    "other JSON": (lambda path: path.write_text('{"a":\n1}'), r"data\.tokenizer: can't read FILE \("),
    "no end of text": (
        lambda path: byte_tokenizer(path, end_of_text="</s>"),
        r"data\.tokenizer: FILE has no token <\|endoftext\|>",
    ),
    "too small for the text": (words_alone, r"data\.tokenizer: it can't take this corpus \("),
}


@pytest.mark.ray
@pytest.mark.parametrize("mistake", TOKENIZER_MISTAKES)
def test_a_mistake_in_a_tokenizer_is_named(tmp_path, ray_cluster, job, complaint, mistake):
    write, expected = TOKENIZER_MISTAKES[mistake]
    path = tmp_path / "tokenizer.json"
    write(path)
    said = complaint("train", job, f"data.tokenizer={path}")
    assert re.match(expected.replace("FILE", re.escape(str(path))), said)
    assert left_behind(tmp_path) == []


@pytest.mark.ray
@pytest.mark.parametrize("learned", [True, False])
def test_a_vocabulary_over_the_models_is_named_before_anything_is_packed(
    tmp_path, ray_cluster, job, complaint, monkeypatch, learned
):
    monkeypatch.setattr("tokendrop.data.prepare.pipeline.tokenized", None)
    given = [] if learned else [f"data.tokenizer={byte_tokenizer(tmp_path / 'tokenizer.json')}"]
    said = complaint("train", job, "model.vocab_size=256", *given)
    assert re.match(r"model\.vocab_size: want at least the tokenizer's \d+ tokens, got 256", said)
    assert left_behind(tmp_path) == []


# --- the real command line ---


@pytest.mark.ray
@pytest.mark.parametrize(
    ("command", "mistake"),
    [("plan", None), ("prepare", "a .zst cut short"), ("train", "a line without text")],
)
def test_the_command_alone_exits_with_2_and_one_line(tmp_path, job, command, mistake):
    arguments, expected = ["train.globl_batch=4"], r".*train\.globl_batch: unknown key"
    if mistake:
        name, content, said = CORPUS_MISTAKES[mistake]
        (tmp_path / name).write_bytes(content)
        tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
        arguments = [f"data.corpus=[{tmp_path / name}]", f"data.tokenizer={tokenizer}"]
        expected = said.replace("FILE", re.escape(str(tmp_path / name)))
    ended = subprocess.run(
        [sys.executable, "-m", "tokendrop", command, str(job), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert re.fullmatch(f"(connect  .*\n(prepare  .*\n)?)?tokendrop: {expected}.*\n", ended.stderr)
    assert left_behind(tmp_path) == []
