"""One global batch, shared out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import splits_in_groups
from tokendrop.schedule.batch import BatchSplit


@given(splits_in_groups())
def test_every_micro_batch_is_run_by_all_ranks_of_exactly_one_group(split: BatchSplit) -> None:
    for number in range(split.global_batch // split.micro_batch):
        ranks = [rank for rank in range(split.world_size) if number in split.micro_batches(rank)]
        first = ranks[0]
        assert first % split.group == 0
        assert ranks == list(range(first, first + split.group))


@given(splits_in_groups(), st.integers(1, 12), st.integers(0, 30))
def test_legal_world_sizes_are_those_that_a_batch_can_be_split_for(split: BatchSplit, least: int, more: int) -> None:
    def fits(size: int) -> bool:
        try:
            replace(split, world_size=size)
        except ValueError:
            return False
        return True

    assert split.world_sizes(least, least + more) == [one for one in range(least, least + more + 1) if fits(one)]


@given(splits_in_groups())
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
