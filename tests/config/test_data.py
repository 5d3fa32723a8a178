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
