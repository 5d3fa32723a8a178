"""Rows of sentence pairs: whole sentences of one document, in order, nothing lost."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pairs import as_documents
from tokendrop.data.prepare.pack import Documents
from tokendrop.data.prepare.pair_rows import PairPacker
from tokendrop.data.read.pair_runs import pair_row_length, read_runs

SENTENCES = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 40)), max_size=25)
DOCUMENTS = st.lists(SENTENCES, min_size=1, max_size=12)
LENGTHS = st.integers(5, 60)
SHARES = st.sampled_from([0.0, 0.1, 1.0])


def rows_of(packer: PairPacker) -> np.ndarray:
    """All that are ready; there may be none."""
    if not packer.rows_ready():
        return np.empty((0, pair_row_length(packer.room + 3)), np.int64)
    return packer.take(packer.rows_ready()).rows_NT.astype(np.int64)


def runs(rows: np.ndarray, length: int) -> list[tuple[list[int], list[int]]]:
    """Of each row, its tokens and those of them that begin a sentence."""
    read = read_runs(rows, sequence_length=length)
    found = []
    for tokens, count, begins in zip(read.tokens_BR, read.lengths_B, read.begins_BR, strict=True):
        assert not tokens[count:].any()
        assert not begins[count:].any()
        found.append((tokens[:count].tolist(), tokens[begins].tolist()))
    return found


@given(sentences=DOCUMENTS, length=LENGTHS, share=SHARES)
def test_rows_are_all_tokens_of_one_document_after_the_other_but_single_ones_that_are_alone(sentences, length, share):
    packer = PairPacker(length, short_share=share)
    packer.add(as_documents(sentences))
    found = runs(rows_of(packer), length)
    first, left = 0, list(found)
    for document in sentences:
        tokens = list(range(first, first + sum(document)))
        first += len(tokens)
        mine = []
        while left and left[0][0][0] in range(first - len(tokens), first):
            mine += left.pop(0)[0]
        assert mine in (tokens, tokens[:-1])
    assert left == []
    assert all(2 <= len(tokens) <= length - 3 for tokens, _ in found)


@given(sentences=DOCUMENTS, length=LENGTHS, share=SHARES)
def test_every_row_begins_with_a_sentence_and_has_another_and_long_ones_alone_are_cut(sentences, length, share):
    packer = PairPacker(length, short_share=share)
    packer.add(as_documents(sentences))
    sizes = np.array([one for document in sentences for one in document], np.int64)
    ends, size_of = np.cumsum(sizes), np.repeat(sizes, sizes)
    truly = {0, *ends.tolist()}
    for tokens, begins in runs(rows_of(packer), length):
        assert begins[0] == tokens[0]
        assert len(begins) >= 2
        assert truly.intersection(tokens) <= set(begins)
        for cut in set(begins) - truly:
            is_alone = set(tokens) <= set(range(cut - size_of[cut] + 1, cut + size_of[cut]))
            assert size_of[cut] > (length - 3) // 2 or is_alone


@given(sentences=DOCUMENTS, length=LENGTHS, share=SHARES, data=st.data())
def test_rows_are_the_same_however_documents_arrive_and_wherever_a_packer_begins(sentences, length, share, data):
    documents = as_documents(sentences)
    whole = PairPacker(length, short_share=share)
    whole.add(documents)
    wanted = rows_of(whole)

    parts, begin, found = PairPacker(length, short_share=share), None, []
    for number in range(len(sentences)):
        parts.add(some(documents, number, number + 1))
        ready = parts.rows_ready()
        if ready and data.draw(st.booleans()):
            packed = parts.take(data.draw(st.integers(1, ready)))
            begin = packed.next
            found.append(packed.rows_NT)
            if data.draw(st.booleans()):  # an attempt that goes on from there, and reads the document again
                parts = PairPacker(length, short_share=share, begin=begin)
                first = max(0, begin.seen - data.draw(st.integers(0, 2)))
                if first <= number:
                    parts.add(some(documents, first, number + 1))
    assert np.array_equal(np.concatenate([*found, rows_of(parts)]), wanted)


def some(documents: Documents, first: int, stop: int) -> Documents:
    ends = np.cumsum(documents.lengths_D)
    start, end = int(ends[first] - documents.lengths_D[first]), int(ends[stop - 1])
    edges = np.cumsum(documents.sentences_N)
    inside = (edges > start) & (edges <= end)
    return Documents(
        documents.tokens_N[start:end],
        documents.lengths_D[first:stop],
        documents.subsets_D[first:stop],
        documents.files_D[first:stop],
        documents.records_D[first:stop],
        documents.seen_D[first:stop],
        documents.bytes_D[first:stop],
        documents.sentences_N[inside],
    )


@given(sentences=DOCUMENTS, length=LENGTHS)
def test_rows_say_whose_they_are_and_sets_are_counted(sentences, length):
    documents = as_documents(sentences)
    packer = PairPacker(length, short_share=0.1)
    packer.add(documents)
    if not packer.rows_ready():
        return
    packed = packer.take(packer.rows_ready())
    firsts = np.cumsum(documents.lengths_D) - documents.lengths_D
    tokens, begun = Counter(), {}
    for row, origin in zip(packed.rows_NT.astype(int), packed.documents.to_pylist(), strict=True):
        (one,) = origin
        number = 5 * one["file"] + one["record"] - 1
        assert row[1] + one["start"] == firsts[number]
        assert one["subset"] == documents.subsets_D[number]
        tokens[one["subset"]] += row[0]
        begun.setdefault(one["subset"], set()).add(number)
    for counts in packed.subsets:
        assert counts.tokens == tokens[counts.subset]
        assert counts.documents == len(begun[counts.subset])
        assert counts.bytes == sum(number + 100 for number in begun[counts.subset])
    assert {counts.subset for counts in packed.subsets} == set(tokens)


def test_without_short_rows_each_is_as_full_as_whole_sentences_make_it():
    packer = PairPacker(63, short_share=0.0)
    packer.add(as_documents([[7] * 85]))
    assert {len(tokens) for tokens, _ in runs(rows_of(packer), 63)[:-2]} == {56}


def test_the_wanted_share_of_rows_is_short_and_their_lengths_are_all_as_likely():
    packer = PairPacker(23, short_share=0.25)
    packer.add(as_documents([[1] * 60_000]))
    counts = Counter(len(tokens) for tokens, _ in runs(rows_of(packer), 23))
    total = counts.total()
    short = [counts[length] for length in range(2, 20)]  # of 2..20, the last of which is a full row
    assert sum(short) / total == pytest.approx(0.25 * 18 / 19, abs=4 * (0.25 * 0.75 / total) ** 0.5)
    expected = sum(short) / len(short)
    assert sum((one - expected) ** 2 / expected for one in short) < 40.8  # 17 degrees of freedom, p = 0.001


def test_long_sequences_of_few_tokens_keep_their_lengths():
    packer = PairPacker(70_003, short_share=0.0)
    packer.add(as_documents([[30_000, 30_000, 9_000]], np.ones(69_000, np.uint16)))
    ((tokens, begins),) = runs(rows_of(packer), 70_003)
    assert (len(tokens), len(begins)) == (69_000, 3)
