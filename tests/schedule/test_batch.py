"""One global batch, shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import batch_splits
from tokendrop.schedule.batch import BatchSplit


@given(batch_splits())
def test_every_micro_batch_is_run_by_exactly_one_rank(split: BatchSplit) -> None:
    numbers = [number for rank in range(split.world_size) for number in split.micro_batches(rank)]
    assert sorted(numbers) == list(range(split.global_batch // split.micro_batch))


@given(batch_splits())
def test_every_rank_runs_as_many_micro_batches_as_the_accumulation_says(split: BatchSplit) -> None:
    assert {len(split.micro_batches(rank)) for rank in range(split.world_size)} == {split.accumulation}


@given(st.integers(1, 100), st.integers(1, 10), st.integers(1, 10))
def test_a_batch_that_does_not_divide_is_refused(global_batch: int, micro: int, world: int) -> None:
    remainder = global_batch % (micro * world)
    if remainder:
        with pytest.raises(ValueError, match="must be a multiple"):
            BatchSplit(global_batch=global_batch, micro_batch=micro, world_size=world)
    else:
        BatchSplit(global_batch=global_batch, micro_batch=micro, world_size=world)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-4, 2, 2)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BatchSplit(global_batch=sizes[0], micro_batch=sizes[1], world_size=sizes[2])
