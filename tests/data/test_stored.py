"""Jobs on token shards that were prepared before and copied into a store: whether they are those that the job wants."""

import re
from pathlib import Path

import pytest

from corpora import byte_tokenizer
from folders import Document, write_folder
from stores import flaky_store
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.prepare.stored import bytes_at_once, stored_shards
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError

JOB = """
name: tiny
model: {kind: gpt, layers: 2, width: 16, heads: 2, sequence_length: 4, vocab_size: 320}
data: {corpus: [nowhere.jsonl], folder: FOLDER, cache: {folder: CACHE}, shuffle_rows: 8}
train: {length: 2 steps, global_batch: 4, micro_batch: 2, peak_lr: 1.0e-3}
track: {uri: null}
"""
ROWS = 40


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job on a copy of a folder whose corpus is gone."""
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json").read_text()
    documents = [Document([number] * 5) for number in range(ROWS)]
    files = [("corpus", [*documents, Document([0] * 5, split="validation")])]
    write_folder(tmp_path / "prepared", files, rows_per_shard=4, tokenizer=tokenizer, vocab_size=257)
    path = tmp_path / "job.yaml"
    with flaky_store(tmp_path / "prepared") as uri:
        path.write_text(JOB.replace("FOLDER", uri).replace("CACHE", f"{tmp_path}/cache"))
        yield path


def test_the_corpus_is_not_looked_at_and_prepare_gives_the_folder(job: Path) -> None:
    config = load_job(job)
    folder = stored_shards(config)
    assert folder is not None
    assert prepare(config) == folder
    assert read_manifest(folder).shards == read_manifest(job.parent / "prepared").shards
    assert stored_shards(load_job(job, [f"data.folder={job.parent}"])) is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "model.sequence_length=8",
            "model.sequence_length: this job reads 8, the token shards in flaky://copy are of 4",
        ),
        (
            "data.corpus=[] data.sources=[{name: web, corpus: [x], weight: 1}]",
            "data.sources: this job reads web, the token shards in flaky://copy are of corpus",
        ),
        ("model.vocab_size=256", "model.vocab_size: want at least the tokenizer's 257 tokens, got 256"),
        (
            "data.epoch_samples=41",
            "data.epoch_samples: this corpus makes 40 training samples (0 documents were rejected)",
        ),
        ("data.tokenizer=OTHER", "data.tokenizer: OTHER is not the one of the token shards in flaky://copy"),
    ],
)
def test_shards_of_another_form_than_the_job_s_are_refused(job: Path, setting: str, said: str) -> None:
    other = byte_tokenizer(job.parent / "other.json", end_of_text="<end>")
    text = other.read_text().replace("<end>", "<|endoftext|>").replace('"single_word": false', '"single_word": true')
    other.write_text(text)
    with pytest.raises(UserError) as told:
        stored_shards(load_job(job, re.split(" (?=data)", setting.replace("OTHER", str(other)))))
    assert str(told.value).startswith(said.replace("OTHER", str(other)))
    assert "\n" not in str(told.value)


def test_the_tokenizer_that_made_the_shards_may_be_named(job: Path) -> None:
    assert stored_shards(load_job(job, [f"data.tokenizer={job.parent}/tokenizer.json"]))


@pytest.mark.parametrize(("steps", "window", "share"), [(10, 8, 8 / ROWS), (10, 0, 1), (10, 100, 1), (11, 8, 1)])
def test_what_a_run_goes_back_to_is_a_window_in_its_first_epoch_and_all_in_the_next(
    job: Path, steps: int, window: int, share: float
) -> None:
    config = load_job(job, [f"train.length={steps} steps", f"data.shuffle_rows={window}"])
    manifest = read_manifest(job.parent / "prepared")
    size = sum(shard.bytes for shard in manifest.of("corpus", "train"))
    assert bytes_at_once(config, manifest) == pytest.approx(share * size, abs=1)


def test_prepare_into_a_store_is_refused(job: Path, complaint) -> None:
    assert complaint("prepare", job) == (
        "data.folder: flaky://copy is only read; want a folder here, and then to copy the one that this command prints,"
        " e.g. by aws s3 cp --recursive"
    )
