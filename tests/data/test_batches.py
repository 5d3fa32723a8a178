"""Batches: the same samples at any world size and from any step."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.data.read.batches import MicroBatches
from tokendrop.data.read.order import ROW_BITS, SampleOrder, rows_of
from tokendrop.data.shards.format import Committed
from tokendrop.models.batch import Batch
from tokendrop.schedule.batch import BatchSplit
from tokendrop.tasks.causal_lm import text_batch

SEQUENCE = 6


class NumberedSamples:
    """Samples whose rows hold their own number, in the order of a run."""

    def __init__(self, count: int, *, seed: int) -> None:
        self.count, self.order = count, SampleOrder(seed=seed, weights=[1.0], window=7)

    def at(self, positions):
        ids = self.order.sample_ids(positions, Committed((self.count,), is_complete=True))
        return ids, numbered(rows_of(ids, sources=1)[1])


def numbered(rows):
    return rows[:, None] * 100 + np.arange(SEQUENCE + 1)


def batches(case, *, world_size: int, rank: int, held_out: int = 5) -> MicroBatches[Batch]:
    rows, micro_batch, global_batch, seed = case
    return MicroBatches(
        text_batch,
        train=NumberedSamples(rows, seed=seed),
        validation=(np.arange(held_out), numbered(np.arange(held_out))),
        split=BatchSplit(global_batch=global_batch, micro_batch=micro_batch, world_size=world_size),
        rank=rank,
    )


def of_step(case, step: int, *, world_size: int) -> dict[int, tuple[list[int], list[list[int]]]]:
    """By number, the micro batches of all ranks: sample ids and tokens."""
    found = {}
    for rank in range(world_size):
        for batch in batches(case, world_size=world_size, rank=rank).of_step(step):
            assert batch.numbers[0] not in found
            found[batch.numbers[0]] = batch.sample_ids_B.tolist(), batch.input_ids_BS.tolist()
    return found


@st.composite
def cases(draw):
    micro_batch = draw(st.integers(1, 3))
    return (
        draw(st.integers(1, 50)),
        micro_batch,
        4 * micro_batch * draw(st.integers(1, 3)),
        draw(st.integers(0, 99)),
    )


@given(case=cases(), step=st.integers(0, 10**6))
def test_the_global_batch_and_its_micro_batches_do_not_depend_on_the_world_size(case, step):
    alone = of_step(case, step, world_size=1)
    assert sorted(alone) == list(range(case[2] // case[1]))
    assert of_step(case, step, world_size=2) == alone
    assert of_step(case, step, world_size=4) == alone


@given(case=cases(), epochs=st.integers(1, 3))
def test_steps_walk_through_every_row_once_an_epoch(case, epochs):
    rows, _, global_batch, _ = case
    steps = -(-epochs * rows // global_batch)
    ids = [
        i
        for step in range(steps)
        for _, (numbers, _) in sorted(of_step(case, step, world_size=1).items())
        for i in numbers
    ]
    epochs_of, numbers = np.divmod(np.array(ids[: epochs * rows]), 1 << ROW_BITS)
    assert sorted(zip(epochs_of.tolist(), numbers.tolist(), strict=True)) == [
        (epoch, row) for epoch in range(epochs) for row in range(rows)
    ]
    assert len(set(ids)) == len(ids)


@given(case=cases(), step=st.integers(0, 50), world_size=st.sampled_from([1, 2, 4]))
def test_a_run_that_resumes_reads_what_it_would_have_read(case, step, world_size):
    through = batches(case, world_size=world_size, rank=world_size - 1)
    for earlier in range(step):
        list(through.of_step(earlier))
    resumed = batches(case, world_size=world_size, rank=world_size - 1)
    for expected, found in zip(through.of_step(step), resumed.of_step(step), strict=True):
        assert torch.equal(found.sample_ids_B, expected.sample_ids_B)
        assert torch.equal(found.input_ids_BS, expected.input_ids_BS)
        assert torch.equal(found.labels_BS, expected.labels_BS)


def test_labels_are_the_next_tokens_and_ids_say_which_row_was_read():
    case = (7, 2, 4, 3)
    for batch in batches(case, world_size=1, rank=0).of_step(5):
        assert batch.input_ids_BS.shape == batch.labels_BS.shape == (2, SEQUENCE)
        assert torch.equal(batch.input_ids_BS[:, 1:], batch.labels_BS[:, :-1])
        assert torch.equal(batch.input_ids_BS[:, 0] // 100, batch.sample_ids_B % (1 << ROW_BITS))
        assert torch.equal(batch.labels_BS[:, -1] % 100, torch.full((2,), SEQUENCE))


@given(case=cases(), held_out=st.integers(1, 40), world_size=st.sampled_from([1, 2, 4]))
def test_every_held_out_row_counts_once_over_all_workers_and_each_has_as_many_batches(case, held_out, world_size):
    """As many, for workers that share their weights out gather them together."""
    shares = [
        batches(case, world_size=world_size, rank=rank, held_out=held_out).validation() for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    counted = []
    for batch, counts in (pair for share in shares for pair in share):
        ids = batch.sample_ids_B.tolist()
        assert 1 <= len(ids) <= case[1]
        assert counts in (0, len(ids))
        counted += ids[:counts]
        assert torch.equal(batch.input_ids_BS[:, 0] // 100, batch.sample_ids_B)
    assert sorted(counted) == list(range(held_out))
