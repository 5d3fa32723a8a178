"""Sentences: a rule, and what it must not do to tokens."""

import json
from itertools import islice

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.data.prepare.encoder import Encoder
from tokendrop.data.prepare.sentences import split_sentences
from tokendrop.data.tokenizer import load_tokenizer

LIKELY = st.text(st.sampled_from(list("aBé.!?…。\n\t \"”)1'")), max_size=60)


@given(text=st.one_of(st.text(), LIKELY))
def test_sentences_joined_are_the_text(text):
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentences)


@pytest.mark.parametrize(
    "sentences",
    [
        ["It rains. ", "She said: “Go!” ", "(He did.) ", "Why? ", "No end… ", "2 more"],
        ["A heading\n", "A line.\n\n  ", "small letters begin this one"],
        ["The U.S. Army, e.g. Mr. J. Smith of St. Ives and Dr. Who, left at 5 p.m. sharp. ", "They don't. ", "We do."],
        ["1. First point. ", "Version 3.11 is here, i.e. out. ", "See example.com. now"],
        ["彼は来た。", "「はい。」", "なぜ？", "End"],  # noqa: RUF001
        [],
    ],
)
def test_a_sentence_ends_where_the_rule_says(sentences):
    assert split_sentences("".join(sentences)) == sentences


def test_splitting_changes_no_token_of_real_text(real_data):
    encoder = Encoder(load_tokenizer(real_data / "bert_vocab" / "vocab.txt", "sentence_pairs"))
    with zstandard.open(real_data / "pile_like" / "redpajama_sample.jsonl.zst", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 100)]
    for text in texts:
        parts = encoder(split_sentences(text))
        assert [int(token) for part in parts for token in part] == encoder([text])[0].tolist()
