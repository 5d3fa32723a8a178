"""The order of samples: every row once an epoch, another order each time, found without the ones before."""

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokendrop.data.order import sample_ids

SEEDS = st.integers(-(2**63), 2**64 - 1)


@given(rows=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
@example(rows=1, seed=0, epoch=0)
@example(rows=2, seed=0, epoch=0)
@example(rows=3, seed=0, epoch=0)
@example(rows=4, seed=-1, epoch=1)
@example(rows=1025, seed=1234, epoch=3)
def test_an_epoch_has_every_row_once_and_ids_that_no_other_epoch_has(rows, seed, epoch):
    ids = sample_ids(np.arange(epoch * rows, (epoch + 1) * rows), rows=rows, seed=seed)
    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(epoch * rows, (epoch + 1) * rows))


@given(
    rows=st.integers(1, 3000),
    seed=SEEDS,
    places=st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
)
def test_a_position_has_its_sample_whoever_asks_and_with_whatever_else(rows, seed, places):
    together = sample_ids(np.array(places), rows=rows, seed=seed)
    alone = [sample_ids(np.array([place]), rows=rows, seed=seed).item() for place in places]
    assert together.tolist() == alone


@given(rows=st.integers(50, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_epochs_and_seeds_have_orders_of_their_own(rows, seed, epoch):
    def order(seed: int, epoch: int) -> list[int]:
        return (sample_ids(np.arange(rows) + epoch * rows, rows=rows, seed=seed) % rows).tolist()

    here = order(seed, epoch)
    assert here != list(range(rows))
    assert here != order(seed, epoch + 1)
    assert here != order(seed + 1, epoch)
    assert order(seed, epoch + 1) != order(seed + 1, epoch)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [1000, 1024, 1025, 4096, 5000])
def test_an_epoch_looks_shuffled(rows, seed):
    order = sample_ids(np.arange(rows), rows=rows, seed=seed)
    deviation = 1 / np.sqrt(rows)  # of the correlation of two unrelated orders
    assert abs(np.corrcoef(order, np.arange(rows))[0, 1]) < 4 * deviation
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 * deviation
    assert sum(a + 1 == b for a, b in pairwise(order.tolist())) < 10  # one is expected
    assert (order == np.arange(rows)).sum() < 10


def test_each_row_is_as_often_first_as_any_other():
    rows, epochs = 8, 8000
    firsts = Counter((sample_ids(np.arange(epochs) * rows, rows=rows, seed=7) % rows).tolist())
    expected = epochs / rows
    chi_squared = sum((firsts[row] - expected) ** 2 / expected for row in range(rows))
    assert chi_squared < 24.3  # 7 degrees of freedom, p = 0.001


def test_a_far_position_costs_no_more_than_the_first():
    def seconds(first: int) -> float:
        positions = np.arange(first, first + 64)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            sample_ids(positions, rows=150_000_000, seed=1)
            times.append(time.perf_counter() - began)
        return min(times)

    assert seconds(10**15) < 20 * seconds(0)
