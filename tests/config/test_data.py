"""What a corpus of several sources is split into."""

from hypothesis import given
from hypothesis import strategies as st

from tokendrop.config.data import DataConfig, SourceConfig


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=30), sequences=st.integers(1, 500))
def test_held_out_sequences_are_shared_out_by_weight_to_the_last_one(weights: list[float], sequences: int) -> None:
    sources = [SourceConfig(name=f"s{n}", corpus=("a",), weight=weight) for n, weight in enumerate(weights)]
    shares = DataConfig(sources=tuple(sources)).held_out_shares(sequences)
    assert sum(shares) == sequences
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight / sum(weights) * sequences) < 1


@given(
    sources=st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 20)), min_size=1, max_size=30),
    sequences=st.integers(1, 500),
)
def test_as_many_sequences_are_held_out_as_were_asked_for_where_there_are_so_many(
    sources: list[tuple[float, int]], sequences: int
) -> None:
    named = [SourceConfig(name=f"s{n}", corpus=("a",), weight=weight) for n, (weight, _) in enumerate(sources)]
    data, have = DataConfig(sources=tuple(named)), [count for _, count in sources]
    counts = data.held_out_counts(sequences, have)
    assert sum(counts) == min(sequences, sum(have))
    shares = data.held_out_shares(sequences)
    assert all(min(pair) <= count for count, *pair in zip(counts, have, shares, strict=True))
    assert all(count <= most for count, most in zip(counts, have, strict=True))
    if all(share <= most for share, most in zip(shares, have, strict=True)):
        assert counts == shares  # what training may begin with, while the rest is prepared, is what it ends with


def test_a_source_without_held_out_rows_leaves_its_share_to_the_others() -> None:
    weights = {"web": 1000.0, "code": 2.0, "books": 1.0}
    data = DataConfig(sources=tuple(SourceConfig(name=n, corpus=("a",), weight=w) for n, w in weights.items()))
    assert data.held_out_shares(6) == (6, 0, 0)
    assert data.held_out_counts(6, (0, 50, 50)) == (0, 4, 2)
