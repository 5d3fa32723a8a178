"""The order of samples: every row once an epoch, by arithmetic, whatever is prepared when."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokendrop.data.read.order import ROW_BITS, NotPreparedError, SampleOrder, first_ids, rows_of
from tokendrop.data.shards.format import Committed

SEEDS = st.integers(-(2**63), 2**64 - 1)
SIZES = st.integers(1, 3000)
WINDOWS = st.integers(0, 700)


def alone(*, seed: int, window: int = 0) -> SampleOrder:
    return SampleOrder(seed=seed, weights=[1.0], window=window)


def whole(*rows: int) -> Committed:
    return Committed(rows, is_complete=True)


@given(rows=SIZES, seed=SEEDS, epoch=st.integers(0, 10**5), window=WINDOWS)
@example(rows=1, seed=0, epoch=0, window=0)
@example(rows=2, seed=0, epoch=0, window=1)
@example(rows=3, seed=0, epoch=1, window=2)
@example(rows=1025, seed=1234, epoch=0, window=1024)
def test_an_epoch_has_every_row_once_and_ids_that_no_other_epoch_has(rows, seed, epoch, window):
    order = alone(seed=seed, window=window)
    ids = order.sample_ids(np.arange(epoch * rows, (epoch + 1) * rows), whole(rows))
    sources, numbers = rows_of(ids, sources=1)
    assert not sources.any()
    assert sorted(numbers.tolist()) == list(range(rows))
    assert np.array_equal(np.sort(ids) - np.arange(rows), np.full(rows, epoch << ROW_BITS))


@given(rows=SIZES, seed=SEEDS, window=st.integers(1, 700))
def test_the_first_epoch_goes_through_its_windows_one_after_the_other(rows, seed, window):
    ids = alone(seed=seed, window=window).sample_ids(np.arange(rows), whole(rows))
    assert np.array_equal(ids // window, np.arange(rows) // window)


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    seed=SEEDS,
    places=st.lists(st.integers(0, 2**28), min_size=1, max_size=20),
    window=WINDOWS,
)
def test_a_position_has_its_sample_whoever_asks_and_with_whatever_else(weights, seed, places, window):
    order = SampleOrder(seed=seed, weights=weights, window=window)
    committed = whole(*(100 + 37 * source for source in range(len(weights))))
    together = order.sample_ids(np.array(places), committed)
    assert together.tolist() == [order.sample_ids(np.array([place]), committed).item() for place in places]


@settings(max_examples=15)
@given(
    weights=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    seed=SEEDS,
    rows=st.lists(st.integers(1, 400), min_size=5, max_size=5),
    window=WINDOWS,
)
def test_sources_come_by_their_weights_and_each_goes_through_its_own_epochs(weights, seed, rows, window):
    rows = rows[: len(weights)]
    order, periods = SampleOrder(seed=seed, weights=weights, window=window), 2
    ids = order.sample_ids(np.arange(periods * 4096), whole(*rows))
    assert len(set(ids.tolist())) == len(ids)
    sources, numbers = rows_of(ids, sources=len(rows))
    for source, size in enumerate(rows):
        mine = numbers[sources == source]
        assert abs(len(mine) - periods * 4096 * Fraction(weights[source], sum(weights))) <= periods * len(weights)
        for first in range(0, len(mine) - size + 1, size):
            assert sorted(mine[first : first + size].tolist()) == list(range(size))


@pytest.mark.parametrize("small", [1, 64, 100, 1000])
def test_many_small_sources_have_a_turn_each_and_the_large_one_all_others(small):
    order = SampleOrder(seed=1, weights=[1.0, *[1e-6] * small], window=0)
    sources, _ = rows_of(order.sample_ids(np.arange(4096), whole(5000, *[3] * small)), sources=1 + small)
    assert np.bincount(sources).tolist() == [4096 - small, *[1] * small]


@settings(max_examples=20)
@given(
    rows=st.lists(st.integers(1, 500), min_size=1, max_size=3),
    seed=SEEDS,
    window=st.integers(1, 200),
    data=st.data(),
)
def test_what_is_known_before_all_is_prepared_is_what_is_known_after(rows, seed, window, data):
    order = SampleOrder(seed=seed, weights=[1.0] * len(rows), window=window)
    expected = order.sample_ids(np.arange(sum(rows)), whole(*rows)).tolist()
    so_far = Committed(tuple(data.draw(st.integers(0, size)) for size in rows), is_complete=False)
    known = 0
    for position, sample in enumerate(expected):
        try:
            assert order.sample_ids(np.array([position]), so_far).item() == sample
            known += 1
        except NotPreparedError:
            continue
        sources, numbers = rows_of(np.array([sample]), sources=len(rows))
        assert numbers.item() < so_far.rows[sources.item()]
    if len(rows) == 1:
        assert known == so_far.rows[0] // window * window


def test_nothing_is_known_of_an_order_over_everything_before_it_is_prepared():
    with pytest.raises(NotPreparedError):
        alone(seed=1).sample_ids(np.array([0]), Committed((10**6,), is_complete=False))


@given(rows=st.integers(50, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_epochs_seeds_and_sources_have_orders_of_their_own(rows, seed, epoch):
    def order(seed: int, epoch: int) -> list[int]:
        ids = alone(seed=seed).sample_ids(np.arange(rows) + epoch * rows, whole(rows))
        return rows_of(ids, sources=1)[1].tolist()

    here = order(seed, epoch)
    assert here != list(range(rows))
    assert here != order(seed, epoch + 1)
    assert here != order(seed + 1, epoch)
    assert order(seed, epoch + 1) != order(seed + 1, epoch)
    ids = SampleOrder(seed=seed, weights=[1, 1], window=0).sample_ids(np.arange(4 * rows), whole(rows, rows))
    sources, numbers = rows_of(ids, sources=2)
    assert numbers[sources == 0][:rows].tolist() != numbers[sources == 1][:rows].tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [1000, 1024, 1025, 2048, 4096, 5000])
def test_an_epoch_looks_shuffled(rows, seed):
    order = alone(seed=seed).sample_ids(np.arange(rows), whole(rows))
    deviation = 1 / np.sqrt(rows)  # of the correlation of two unrelated orders
    assert abs(np.corrcoef(order, np.arange(rows))[0, 1]) < 4 * deviation
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 * deviation
    assert sum(a + 1 == b for a, b in pairwise(order.tolist())) < 10  # one is expected
    assert (order == np.arange(rows)).sum() < 10


@pytest.mark.parametrize("rows", [8, 12])
def test_each_row_is_as_often_first_as_any_other(rows):
    epochs = 8000
    ids = alone(seed=7).sample_ids(np.arange(epochs) * rows, whole(rows))
    firsts = Counter(rows_of(ids, sources=1)[1].tolist())
    expected = epochs / rows
    chi_squared = sum((firsts[row] - expected) ** 2 / expected for row in range(rows))
    assert chi_squared < {8: 24.3, 12: 31.3}[rows]  # rows - 1 degrees of freedom, p = 0.001


@given(source=st.integers(0, 4), count=st.integers(0, 50))
def test_first_ids_are_those_of_the_first_epoch(source, count):
    sources, numbers = rows_of(first_ids(source, count), sources=5)
    assert set(sources.tolist()) <= {source}
    assert numbers.tolist() == list(range(count))
