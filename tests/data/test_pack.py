"""Packing: documents end to end, cut every row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.data.pack import Packer

DOCUMENTS = st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=40), max_size=30)


@given(tokens=DOCUMENTS, row_length=st.integers(1, 17), count=st.integers(1, 5), data=st.data())
def test_rows_are_the_tokens_in_order_cut_every_row_however_they_arrive(tokens, row_length, count, data):
    packer, groups = Packer(row_length), []
    for document in tokens:
        packer.add(np.array(document, dtype=np.uint16))
        if data.draw(st.booleans()):
            groups += packer.rows(count)
    groups += packer.rows(count)
    rest = packer.rest()

    assert all(group.shape == (count, row_length) for group in groups)
    assert rest.shape[1] == row_length
    assert len(rest) < count
    packed = np.concatenate([rest[:0], *groups, rest]).ravel().tolist()
    flat = [token for document in tokens for token in document]
    assert packed == flat[: len(packed)]
    assert len(flat) - len(packed) < row_length


def test_a_packer_with_nothing_in_it_has_no_rows():
    packer = Packer(5)
    assert list(packer.rows(1)) == []
    assert packer.rest().shape == (0, 5)
