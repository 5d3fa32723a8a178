"""Sentence pairs through preparation: from files, by Ray, to batches."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from corpora import byte_tokenizer, tiny_job, write_corpus
from pairs import LENGTH, texts, write_vocabulary
from tokendrop.cli.main import main
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.prepare.encoder import Encoder
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.read.batches import MicroBatches
from tokendrop.data.read.mask_tokens import IGNORED
from tokendrop.data.read.pair_runs import pair_row_length, read_runs
from tokendrop.data.read.pairs import PairMaker, PairSamples, held_out_pairs
from tokendrop.data.read.row_reader import Rows, held_out_ids, sample_order
from tokendrop.data.shards.format import TOKENIZER
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.data.tokenizer import PAIR_TOKENS, load_tokenizer, pair_vocabulary
from tokendrop.errors import UserError
from tokendrop.tasks.masked_lm import pair_batch

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CORPUS = texts(120, seed=3)


def job(folder: Path, corpus: Path, **data: object) -> ExperimentConfig:
    """A BERT's job; its shards lie in the folder."""
    folder.mkdir(exist_ok=True)
    model = {"kind": "bert", "sequence_length": LENGTH, "vocab_size": 1024}
    data = {"rows_per_shard": 64, "shuffle_rows": 128, **data}
    return load_job(tiny_job(folder, [corpus], model=model, data=data, task={"kind": "masked_lm"}))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.arrow")} | {
        "lines": (folder / "shards.jsonl").read_bytes()
    }


@pytest.fixture
def corpus(tmp_path) -> Path:
    write_corpus(tmp_path / "corpus" / "a.jsonl.zst", CORPUS[:70])
    write_corpus(tmp_path / "corpus" / "b.jsonl.zst", CORPUS[70:])
    return tmp_path / "corpus"


def test_rows_are_the_documents_by_their_tokenizer_and_batches_are_read_from_them(tmp_path, corpus):
    config = job(tmp_path, corpus, tokenizer=str(write_vocabulary(tmp_path)), pairs={"sentence_task": "nsp"})
    folder = prepare(config)
    header = read_manifest(folder).header
    assert (header.kind, header.row_length) == ("sentence_pairs", pair_row_length(LENGTH))
    tokenizer = load_tokenizer(folder / TOKENIZER, "sentence_pairs")
    whole = [ids.tolist() for ids in Encoder(tokenizer)(CORPUS)]
    train, validation = Rows(folder, "train"), Rows(folder, "validation")
    tokens = 0
    for rows in (train, validation):
        read = read_runs(rows.read(np.arange(rows.committed.rows[0])), sequence_length=LENGTH)
        for run, length in zip(read.tokens_BR.tolist(), read.lengths_B.tolist(), strict=True):
            assert any(document[at : at + length] == run[:length] for document in whole for at in range(len(document)))
            tokens += length
    alone = sum(map(len, whole)) - tokens
    assert 0 <= alone <= len(CORPUS)  # single tokens that no row has
    assert header.tokens == tokens

    pairs, seed = config.data.pairs, config.seed
    make = PairMaker(pairs, pair_vocabulary(tokenizer), sequence_length=LENGTH, seed=seed)
    batches = MicroBatches(
        partial(pair_batch, pairs=make),
        train=PairSamples(train, sample_order(config.data, seed=seed), pairs, seed=seed),
        validation=held_out_pairs(validation, held_out_ids(config.data, validation.committed, 4), pairs, seed=seed),
        split=config.plan.batch,
        rank=0,
    )
    for batch in [*batches.of_step(0), *(batch for batch, _ in batches.validation())]:
        assert batch.input_ids_BS.shape == batch.labels_BS.shape == batch.attention_mask_BS.shape
        assert batch.attention_mask_BS.dtype == torch.bool
        assert batch.token_types_BS.dtype == batch.sentence_labels_B.dtype == torch.int64
        assert (batch.labels_BS != IGNORED).any(1).all()


def test_an_attempt_that_goes_on_writes_what_one_alone_would_have(tmp_path, corpus):
    vocabulary = str(write_vocabulary(tmp_path))
    alone = prepare(job(tmp_path / "alone", corpus, tokenizer=vocabulary))
    config = job(tmp_path / "broken", corpus, tokenizer=vocabulary)

    class StoppedError(Exception):
        pass

    def stop(documents: int, tokens: int) -> None:
        if tokens:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare(config, progress=stop)
    begun = read_manifest(tmp_path / "broken" / "runs" / "data" / alone.name)
    assert 0 < len(begun.shards) < len(read_manifest(alone).shards)
    assert files(prepare(config)) == files(alone)


def test_without_a_tokenizer_a_wordpiece_is_learned_the_same_each_time(tmp_path, corpus):
    first, second = (prepare(job(tmp_path / name, corpus)) for name in ("a", "b"))
    assert (first / TOKENIZER).read_bytes() == (second / TOKENIZER).read_bytes()
    assert files(first) == files(second)
    tokenizer = load_tokenizer(first / TOKENIZER, "sentence_pairs")
    assert [tokenizer.id_to_token(number) for number in range(5)] == [*PAIR_TOKENS]
    assert pair_vocabulary(tokenizer).continues_V.any()
    encoded = Encoder(tokenizer)(CORPUS)
    assert not any((ids == tokenizer.token_to_id("[UNK]")).any() for ids in encoded)


def test_short_rows_make_other_shards_and_what_is_chosen_when_reading_does_not(tmp_path, corpus):
    vocabulary = str(write_vocabulary(tmp_path))
    wanted = prepare(job(tmp_path, corpus, tokenizer=vocabulary))
    chosen = {"sentence_task": "nsp", "mask_share": 0.3, "whole_words": False, "max_predictions": 5}
    assert prepare(job(tmp_path, corpus, tokenizer=vocabulary, pairs=chosen)) == wanted
    assert prepare(job(tmp_path, corpus, tokenizer=vocabulary, pairs={"short_share": 0.5})) != wanted


def test_a_bert_is_prepared_by_the_command(tmp_path, corpus, capsys):
    job(tmp_path, corpus, tokenizer=str(write_vocabulary(tmp_path)))
    main(["prepare", str(tmp_path / "job.yaml"), "--json"])
    assert '"documents": 120' in capsys.readouterr().out


def test_a_tokenizer_that_makes_no_pairs_is_named(tmp_path, corpus):
    with pytest.raises(UserError, match=r"data\.tokenizer: .*bytes\.json is BPE; a model of kind bert wants WordPiece"):
        prepare(job(tmp_path, corpus, tokenizer=str(byte_tokenizer(tmp_path / "bytes.json"))))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\nword\n")
    with pytest.raises(UserError, match=r"data\.tokenizer: .*vocab\.txt has no token \[SEP\], \[MASK\]; want \[PAD\]"):
        prepare(job(tmp_path, corpus, tokenizer=str(tmp_path / "vocab.txt")))
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"can't read .*vocab\.txt \(.*\); want a tokenizer\.json or a vocab\.txt"):
        prepare(job(tmp_path, corpus, tokenizer=str(tmp_path / "vocab.txt")))


def test_a_corpus_of_single_tokens_makes_no_pair_and_is_named(tmp_path):
    corpus = write_corpus(tmp_path / "single.jsonl", ["a"] * 20)
    with pytest.raises(UserError, match=r"its documents make no train row of a pair of sentences"):
        prepare(job(tmp_path, corpus, tokenizer=str(write_vocabulary(tmp_path))))
