"""What pairs are made of: parts swapped and replaced; special tokens, masks and types as Hugging Face has them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import BertTokenizerFast

from pairs import LENGTH, write_vocabulary
from tokendrop.data.prepare.encoder import Encoder
from tokendrop.data.read.pair_runs import Runs
from tokendrop.data.read.pairs import (
    Pairs,
    arrange,
    replace_seconds,
    split_runs,
    swap,
)
from tokendrop.data.tokenizer import load_tokenizer, pair_vocabulary

PAIRS = st.integers(2, 20).flatmap(
    lambda room: st.tuples(
        hnp.arrays(np.int64, (3, room), elements=st.integers(5, 99)),
        hnp.arrays(bool, (3, room)),
        st.lists(st.integers(2, room), min_size=3, max_size=3),
        st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    )
)


def runs_of(case) -> tuple[Runs, np.ndarray]:
    tokens, begins, lengths, bits = case
    lengths = np.array(lengths)
    begins[:, 0] = True
    begins[np.arange(3), lengths // 2] = True
    begins &= np.arange(tokens.shape[1]) < lengths[:, None]
    return Runs(np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0), lengths, begins), np.array(
        bits, np.uint64
    )


@given(case=PAIRS, swapped=hnp.arrays(bool, 3))
def test_swapping_twice_changes_nothing_and_once_puts_b_first(case, swapped):
    runs, bits = runs_of(case)
    pairs = split_runs(runs, bits)
    assert (pairs.first_B > 0).all()
    assert (pairs.second_B > 0).all()
    assert all(runs.begins_BR[row, first] for row, first in enumerate(pairs.first_B))
    once = swap(pairs, swapped)
    for row in range(3):
        first, end = pairs.first_B[row], runs.lengths_B[row]
        a, b = pairs.tokens_BR[row, :first].tolist(), pairs.tokens_BR[row, first:end].tolist()
        assert once.tokens_BR[row, :end].tolist() == (b + a if swapped[row] else a + b)
        assert once.first_B[row] == (len(b) if swapped[row] else len(a))
    twice = swap(once, swapped)
    assert np.array_equal(twice.tokens_BR, pairs.tokens_BR)
    assert np.array_equal(twice.first_B, pairs.first_B)


@given(case=PAIRS, other=st.data(), replaced=hnp.arrays(bool, 3))
def test_what_replaces_b_is_one_part_of_the_other_run_from_a_sentence_on_and_fits(case, other, replaced):
    runs, bits = runs_of(case)
    others = Runs(runs.tokens_BR[::-1] + 100, runs.lengths_B[::-1], runs.begins_BR[::-1])
    pairs = split_runs(runs, bits)
    found = replace_seconds(pairs, runs, others, replaced, bits)
    kept = replace_seconds(pairs, runs, others, ~replaced, bits)
    assert np.array_equal(found.first_B, kept.first_B)  # a label has no part in lengths
    assert np.array_equal(found.second_B, kept.second_B)
    for row in range(3):
        first, second = found.first_B[row], found.second_B[row]
        got = found.tokens_BR[row, first : first + second].tolist()
        assert found.tokens_BR[row, :first].tolist() == pairs.tokens_BR[row, :first].tolist()
        assert 1 <= second <= pairs.second_B[row]
        if not replaced[row]:
            assert got == pairs.tokens_BR[row, first : first + second].tolist()
            continue
        source = others.tokens_BR[row, : others.lengths_B[row]].tolist()
        starts = [place for place in np.flatnonzero(others.begins_BR[row]) if place]
        assert any(source[start : start + second] == got for start in starts)


@pytest.mark.parametrize("words", [(1, 1), (9, 3), (3, 9), (14, 15), (1, 28)])
def test_special_tokens_and_types_lie_where_hugging_face_puts_them(tmp_path, words):
    path = write_vocabulary(tmp_path)
    tokenizer = load_tokenizer(path, "sentence_pairs")
    theirs = BertTokenizerFast(vocab=str(path))
    a, b = (" ".join(f"n{number}" for number in range(count)) for count in words)
    ours = [Encoder(tokenizer)([one])[0].astype(np.int64) for one in (a, b)]
    assert [len(ids) for ids in ours] == [*words]
    tokens = np.zeros((1, LENGTH - 3), np.int64)
    tokens[0, : sum(words)] = np.concatenate(ours)
    pairs = Pairs(tokens, np.array([words[0]]), np.array([words[1]]))
    ids, types, text, real = arrange(pairs, pair_vocabulary(tokenizer), LENGTH)
    wanted = theirs(a, b, padding="max_length", max_length=LENGTH, return_special_tokens_mask=True)
    assert ids[0].tolist() == wanted["input_ids"]
    assert types[0].tolist() == wanted["token_type_ids"]
    assert real[0].astype(int).tolist() == wanted["attention_mask"]
    assert (1 - text[0]).tolist() == wanted["special_tokens_mask"]


def test_the_vocabulary_of_bert_gives_the_tokens_of_hugging_face(real_data):
    path = real_data / "bert_vocab" / "vocab.txt"
    theirs = BertTokenizerFast(vocab=str(path))
    text = "Émile's naïve [SEP] tokenizing (東京) of U.S. words, e.g. \u201cantidisestablishmentarianism\u201d: 3.14!\n"
    ours = Encoder(load_tokenizer(path, "sentence_pairs"))([text])[0].tolist()
    assert ours == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
