"""Tokenizers, learned from a corpus or given: what they do to a corpus, and what they may not."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tokendrop.data.tokenizer as tokenizer_module
from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from folders import bytes_of
from preparing import prepared, sides, streams
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.shards.format import TOKENIZER
from tokendrop.data.shards.manifest import read_manifest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_a_learned_vocabulary_and_its_shards_are_the_same_bytes_each_time(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl.zst", documents(200))
    first = prepared(tmp_path / "a", [corpus], tokenizer_vocab_size=300)
    second = prepared(tmp_path / "b", [corpus], tokenizer_vocab_size=300)
    assert bytes_of(first) == bytes_of(second)
    assert 257 < read_manifest(first).header.vocab_size <= 300
    assert "validation" in sides(first, documents(200), first / TOKENIZER)


def test_a_tokenizer_is_learned_from_all_sources_by_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_TRAINING_CHARACTERS", 6000)
    words = {"first": "first alpha beta", "second": "second gamma delta"}
    for name, text in words.items():
        write_corpus(tmp_path / f"{name}.jsonl", [f"{text} {number}" for number in range(1000)])

    def learned(first: float, second: float) -> tuple[Path, set[str]]:
        sources = [
            {"name": name, "corpus": [str(tmp_path / f"{name}.jsonl")], "weight": weight}
            for name, weight in (("first", first), ("second", second))
        ]
        job = tiny_job(tmp_path, [], data={"corpus": [], "sources": sources}, model={"vocab_size": 50304})
        folder = prepare(load_job(job))
        return folder, set(Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab())

    even, both = learned(1, 1)
    assert {"Ġalpha", "Ġgamma"} <= both
    assert learned(2, 2)[0] == even
    rare, of_first = learned(1000, 1)
    assert rare != even
    assert "Ġalpha" in of_first
    assert "Ġgamma" not in of_first


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_touch_documents(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    plain, limited = byte_tokenizer(tmp_path / "plain.json"), tmp_path / "limited.json"
    bpe = Tokenizer.from_file(str(plain))
    bpe.enable_truncation(16)
    bpe.enable_padding(length=4096)
    bpe.save(str(limited))
    expected = streams(prepared(tmp_path / "a", [corpus], plain))
    assert streams(prepared(tmp_path / "b", [corpus], limited)) == expected


def test_ids_with_gaps_count_up_to_the_largest(tmp_path):
    plain = json.loads(byte_tokenizer(tmp_path / "plain.json").read_text())
    plain["model"]["vocab"] = {letter: 3 * number for letter, number in plain["model"]["vocab"].items()}
    for token in plain["added_tokens"]:
        token["id"] = 70_000
        plain["model"]["vocab"][token["content"]] = 70_000
    (tmp_path / "gaps.json").write_text(json.dumps(plain))
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(60))
    job = tiny_job(tmp_path, [corpus], data={"tokenizer": str(tmp_path / "gaps.json")}, model={"vocab_size": 70_016})
    folder = prepare(load_job(job))
    assert read_manifest(folder).header.vocab_size == 70_001
    sides(folder, documents(60), tmp_path / "gaps.json")
