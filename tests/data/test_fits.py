"""Token shards that a job can't train on are refused before anything is read into them."""

from dataclasses import replace
from pathlib import Path

import pytest

from corpora import tiny_job, write_corpus
from pairs import LENGTH, texts, write_vocabulary
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.prepare.fits import row_length_of
from tokendrop.data.prepare.pipeline import find_corpus, prepare
from tokendrop.data.shards.format import FORMAT, Header
from tokendrop.errors import UserError


def pairs_job(folder: Path, **data: object) -> ExperimentConfig:
    corpus = write_corpus(folder / "corpus.jsonl", texts(5, seed=3))
    model = {"kind": "bert", "sequence_length": LENGTH, "vocab_size": 1024}
    given = {"tokenizer": str(write_vocabulary(folder)), **data}
    return load_job(tiny_job(folder, [corpus], model=model, data=given, task={"kind": "masked_lm"}))


def header_of(config: ExperimentConfig) -> Header:
    """That of a job's token shards, as preparation begins them."""
    return Header(
        format=FORMAT,
        kind=config.task.reads,
        sequence_length=config.model.sequence_length,
        row_length=row_length_of(config),
        vocab_size=300,
        tokenizer_sha256="0" * 64,
        sources=("corpus",),
        files=(str(config.data.corpus[0]),),
    )


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"kind": "text"}, "task.kind: this job reads sentence_pairs, the token shards in .* are of text$"),
        ({"row_length": 7}, r"task: this job reads \d+, the token shards in .* are of 7$"),
        ({"sequence_length": 7}, "model.sequence_length: this job reads 32, the token shards in .* are of 7$"),
    ],
    ids=["text", "row", "sequence"],
)
def test_token_shards_of_another_form_in_the_folder_of_a_job_are_refused(tmp_path, is_complete, other, said):
    config = pairs_job(tmp_path)
    folder = find_corpus(config).folder
    folder.mkdir(parents=True)
    replace(header_of(config), is_complete=is_complete, **other).write(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=rf"^{said}"):
        prepare(config)
    assert sorted(folder.rglob("*")) == before
