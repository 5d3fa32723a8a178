"""Rows streamed by Ray Data: the samples of mapped reading, planned a few thousand at a time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from folders import numbered_rows, write_folder
from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.launch.stream import SPAN, RankSamples, StreamedSamples
from tokendrop.schedule.batch import BatchSplit


@st.composite
def runs(draw) -> tuple[BatchSplit, int, int]:
    """A batch, steps, and one of them."""
    micro, world = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = {"global_batch": micro * world * draw(st.integers(1, 3)), "micro_batch": micro}
    group = draw(st.integers(1, 3))
    split = BatchSplit(**sizes, world_size=world * group, group=group)
    steps = draw(st.integers(1, 30))
    return split, steps, draw(st.integers(0, steps - 1))


def of_rank(split: BatchSplit, rank: int, steps: int) -> RankSamples:
    config = experiment(data__shuffle_rows=0, train__length=f"{steps} steps", train__warmup="0 steps")
    return RankSamples(folder=Path("unused"), config=config, split=split, rank=rank)


@given(runs())
def test_the_spans_of_one_rank_of_each_group_are_every_sample_from_a_step_on_once(run):
    split, steps, start = run
    found = []
    for rank in range(split.world_size):
        samples = of_rank(split, rank, steps)
        spans = list(samples.spans(start))
        assert [step for span in spans for step in span] == [*range(start, steps)]
        assert all(len(span) * samples.per_step <= max(SPAN, samples.per_step) for span in spans)
        for span in spans:
            numbers = np.arange(len(span) * samples.per_step)
            positions = samples.positions(span.start, numbers)
            micro = [
                step * split.global_batch + n * split.micro_batch for step in span for n in split.micro_batches(rank)
            ]
            assert positions[:: split.micro_batch].tolist() == micro  # in the order in which training asks for them
            found += positions.tolist() * (rank % split.group == 0)
    assert sorted(found) == [*range(start * split.global_batch, steps * split.global_batch)]


@given(runs(), st.integers(10**6, 10**12))
def test_what_is_planned_ahead_does_not_grow_with_the_run(run, steps):
    split, _, start = run
    spans = of_rank(split, 0, steps).spans(start)
    for span in (next(spans), next(spans)):
        assert len(span) * split.accumulation * split.micro_batch <= max(SPAN, split.global_batch)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(300)
def test_a_run_of_years_streams_the_mapped_samples_from_any_step(tmp_path):
    write_folder(tmp_path, numbered_rows(40), rows_per_shard=4)
    split = BatchSplit(global_batch=16, micro_batch=2, world_size=2)
    samples = replace(of_rank(split, 1, 10**9), folder=tmp_path)
    mapped, stream = samples.config.task.build(samples.config).open(tmp_path).samples, StreamedSamples(samples)
    for step in (0, 1, 2, 10**8, 3):  # on, to another place, and back
        for number in split.micro_batches(1):
            positions = step * 16 + number * 2 + np.arange(2)
            ids, rows = stream.at(positions)
            wanted = mapped.at(positions)
            assert ids.tolist() == wanted[0].tolist()
            assert rows.tolist() == wanted[1].tolist()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_shards_that_no_machine_sees_are_named(tmp_path):
    split = BatchSplit(global_batch=2, micro_batch=2, world_size=1)
    with pytest.raises(UserError, match=rf"no machine of this cluster sees {tmp_path}/gone"):
        StreamedSamples(replace(of_rank(split, 0, 9), folder=tmp_path / "gone")).at(np.arange(2))
