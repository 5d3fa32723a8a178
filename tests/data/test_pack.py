"""Packing: documents end to end, cut every row, and each row knows its documents."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.data.prepare.pack import Documents, Packed, Packer

CORPUS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["", "web", "code"])), max_size=30)


def documents(corpus: list[tuple[int, str]], first: int, last: int) -> Documents:
    """Those of a corpus; document n is made of tokens that say n, and lies in line n + 1 of file n // 10."""
    numbers = np.arange(first, last)
    lengths = np.array([length for length, _ in corpus[first:last]], np.int64)
    return Documents(
        tokens_N=np.repeat(numbers, lengths).astype(np.uint16),
        lengths_D=lengths,
        subsets_D=[name for _, name in corpus[first:last]],
        files_D=numbers // 10,
        records_D=numbers + 1,
        seen_D=numbers,
        bytes_D=3 * lengths,
    )


def pack(packer: Packer, corpus: list[tuple[int, str]], *, count: int, cuts: list[int]) -> list[Packed]:
    groups = []
    for first, last in zip([0, *cuts], [*cuts, len(corpus)], strict=True):
        packer.add(documents(corpus, first, last))
        while packer.rows_ready() >= count:
            groups.append(packer.take(count))
    if packer.rows_ready():
        groups.append(packer.take(packer.rows_ready()))
    return groups


def cuts(corpus: list[tuple[int, str]]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(corpus)), max_size=5).map(sorted)


@given(corpus=CORPUS, row_length=st.integers(1, 17), count=st.integers(1, 5), data=st.data())
def test_rows_are_the_tokens_in_order_cut_every_row_however_they_arrive(corpus, row_length, count, data):
    groups = pack(Packer(row_length), corpus, count=count, cuts=data.draw(cuts(corpus)))
    flat = [number for number, (length, _) in enumerate(corpus) for _ in range(length)]
    packed = [token for group in groups for token in group.rows_NT.ravel().tolist()]
    assert all(group.rows_NT.shape == (count, row_length) for group in groups[:-1])
    assert packed == flat[: len(packed)]
    assert len(flat) - len(packed) < row_length


@given(corpus=CORPUS, row_length=st.integers(1, 17), count=st.integers(1, 5), data=st.data())
def test_a_row_names_the_document_of_each_of_its_tokens(corpus, row_length, count, data):
    for group in pack(Packer(row_length), corpus, count=count, cuts=data.draw(cuts(corpus))):
        for row, parts in zip(group.rows_NT.tolist(), group.documents.to_pylist(), strict=True):
            starts = [max(0, part["start"]) for part in parts]
            assert starts[0] == 0
            for part, start, end in zip(parts, starts, [*starts[1:], row_length], strict=True):
                number = part["record"] - 1
                assert set(row[start:end]) == {number}
                assert part["file"] == number // 10
                assert part["subset"] == corpus[number][1]
                assert part["start"] >= start - corpus[number][0]


@given(corpus=CORPUS, row_length=st.integers(1, 17), count=st.integers(1, 5))
def test_counts_add_up_to_the_tokens_in_rows_and_the_documents_that_begin_there(corpus, row_length, count):
    groups = pack(Packer(row_length), corpus, count=count, cuts=[])
    tokens, begun, sizes = Counter(), Counter(), Counter()
    for group in groups:
        for one in group.subsets:
            tokens[one.subset] += one.tokens
            begun[one.subset] += one.documents
            sizes[one.subset] += one.bytes
    flat = [number for group in groups for number in group.rows_NT.ravel().tolist()]
    assert tokens == Counter(corpus[number][1] for number in flat)
    assert begun == Counter(corpus[number][1] for number in set(flat))
    assert sizes == Counter({name: sum(3 * corpus[n][0] for n in set(flat) if corpus[n][1] == name) for name in begun})


@given(corpus=CORPUS, row_length=st.integers(1, 17), count=st.integers(1, 3), data=st.data())
def test_a_packer_goes_on_from_where_another_one_was(corpus, row_length, count, data):
    groups = pack(Packer(row_length), corpus, count=count, cuts=[])
    if not groups:
        return
    at = data.draw(st.integers(0, len(groups) - 1))
    place = groups[at].next
    # what comes before is left out, whether it is given again or not
    corpus_from = data.draw(st.integers(0, max(0, place.record - 1)))
    packer = Packer(row_length, begin=place)
    packer.add(documents(corpus, corpus_from, len(corpus)))
    expected = [row for group in groups[at + 1 :] for row in group.rows_NT.tolist()]
    ready = packer.rows_ready()
    found = packer.take(ready) if ready else None
    assert (found.rows_NT.tolist() if found else []) == expected
    if found:
        told = [part for group in groups[at + 1 :] for part in group.documents.to_pylist()]
        assert found.documents.to_pylist() == told
        assert place.seen == place.record - 1
