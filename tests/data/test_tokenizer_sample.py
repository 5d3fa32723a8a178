"""What a tokenizer is trained on: the documents of all sources, in shares that are their weights."""

from hypothesis import given
from hypothesis import strategies as st

from tokendrop.data.tokenizer import by_weight

LENGTHS = st.lists(st.lists(st.integers(0, 30), max_size=40), min_size=1, max_size=4)


@given(LENGTHS, st.data())
def test_all_documents_come_once_each_source_in_its_order_and_in_its_share(lengths, data):
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(lengths), max_size=len(lengths)))
    sources = [[chr(97 + name) * length for length in each] for name, each in enumerate(lengths)]
    sample = list(by_weight([iter(each) for each in sources], weights))
    for name, each in enumerate(sources):
        assert [text for text in sample if text.startswith(chr(97 + name))] == [text for text in each if text]
    assert len(sample) == sum(map(len, sources))
    taken = [0.0] * len(sources)
    left = [sum(map(bool, each)) for each in sources]
    for text in filter(None, sample):
        name = ord(text[0]) - 97
        # nobody is ahead of one that has documents left by more than its last document
        assert all(taken[name] <= taken[other] + 1e-9 for other in range(len(sources)) if left[other])
        taken[name] += len(text) / weights[name]
        left[name] -= 1


@given(st.lists(st.text(max_size=9), max_size=20), st.floats(0.1, 10))
def test_one_source_is_read_as_it_is(texts, weight):
    assert list(by_weight([iter(texts)], [weight])) == texts
