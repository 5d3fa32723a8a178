"""What text is judged by."""

from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from corpora import byte_tokenizer
from folders import Document, write_folder
from tiny import experiment

LOSS, LENGTH = 0.01, 16
words = st.text("aé.", min_size=1, max_size=9)
lines = st.lists(st.lists(words, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=30)


@given(lines, st.sampled_from(["", "\n", " ", "<|endoftext|>"]), st.integers(1, 4))
def test_words_are_those_of_each_document_whatever_is_between_two_of_them(texts, after: str, rows_a_shard: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = Tokenizer.from_file(str(byte_tokenizer(folder / "tokenizer.json")))
        documents = [tokenizer.encode(text + after).ids for text in texts]
        held_out = sum(map(len, documents)) // (LENGTH + 1)
        assume(held_out)
        write_folder(
            folder,
            [("corpus", [Document(ids, split="validation") for ids in documents])],
            **{"sequence_length": LENGTH, "vocab_size": 257, "rows_per_shard": rows_a_shard},
        )
        config = experiment(model__sequence_length=LENGTH, evaluate__sequences=held_out)
        judged = config.task.build(config).open(folder).judge("validation", LOSS, None, tokenizer)

    left, expected = held_out * (LENGTH + 1), 0
    for ids in documents:  # the last one may be cut within a word, which counts
        expected += len(tokenizer.decode(ids[:left]).split())
        left = max(0, left - len(ids))
    assert judged["word_perplexity"] == pytest.approx(exp(LOSS * held_out * (LENGTH + 1) / expected))
