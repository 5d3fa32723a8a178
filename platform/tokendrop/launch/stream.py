"""Training samples streamed to each rank by Ray Data, in the order that memory-mapped reading has."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokendrop.config.data import DataConfig
from tokendrop.data.rows import MappedSamples, Rows, sample_order
from tokendrop.launch.worker import WorkerTask
from tokendrop.schedule.batch import BatchSplit
from tokendrop.track.run_folder import CHECKPOINTS
from tokendrop.train.committed import committed_step

STREAM = "rows"
_ROWS_PER_BLOCK, _MOST_TASKS = 512, 256


class RowStreams(ray.train.DataConfig):
    """One ordered stream of rows a rank, from the step of the last checkpoint on.

    Ray Train asks for the streams anew for each worker group, and so after each loss of a worker or change of the
    world size: Ray's own iterators have no state, but the order of samples needs none.
    """

    def __init__(self, task: WorkerTask) -> None:
        super().__init__()
        self.task = task
        self.node = ray.get_runtime_context().get_node_id()

    def configure(self, datasets: Any, world_size: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        start = committed_step(self.task.run / CHECKPOINTS)
        split = replace(self.task.config.plan().batch, world_size=world_size)
        return [{STREAM: self._stream(split, rank, start).iterator()} for rank in range(world_size)]

    def _stream(self, split: BatchSplit, rank: int, start: int) -> ray.data.Dataset:
        config = self.task.config
        per_step = split.accumulation * split.micro_batch
        count = (config.steps - start) * per_step
        fetch: Any = partial(
            _fetch,
            folder=self.task.data,
            data=config.data,
            seed=config.seed,
            split=split,
            rank=rank,
            start=start,
            count=count,
        )
        # On the driver's node, which has the shards; no cores of its own: the workers may have booked them all, and
        # reading mapped memory takes little of one. For that reason not `ray.data.range`, whose tasks want cores.
        here = NodeAffinitySchedulingStrategy(self.node, soft=False)
        blocks = [*range(-(-count // _ROWS_PER_BLOCK))]
        stream = ray.data.from_items(blocks, override_num_blocks=min(len(blocks), _MOST_TASKS)).map_batches(
            fetch, batch_size=1, num_cpus=0, scheduling_strategy=here
        )
        stream.context.execution_options.preserve_order = True
        stream.context.enable_progress_bars = False
        return stream


class StreamedSamples:
    """`Samples` of a rank's stream: it gives those that are asked for, and only in their order."""

    def __init__(self, stream: ray.data.DataIterator, *, micro_batch: int) -> None:
        self._batches: Iterator[Any] = iter(stream.iter_batches(batch_size=micro_batch, batch_format="numpy"))

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next samples of the stream: ids (B,) and rows (B, row_length); raises RuntimeError if others come."""
        batch = next(self._batches)
        if not np.array_equal(batch["position"], positions):
            raise RuntimeError(f"the stream gave positions {batch['position'].tolist()}, wanted {positions.tolist()}")
        return batch["sample_id"], batch["tokens"].astype(np.int64)


def _fetch(
    batch: dict[str, NDArray[np.int64]],
    *,
    folder: Path,
    data: DataConfig,
    seed: int,
    split: BatchSplit,
    rank: int,
    start: int,
    count: int,
) -> dict[str, NDArray[Any]]:
    """The samples of one block of a rank's stream, which has `count` samples."""
    first = int(batch["item"][0]) * _ROWS_PER_BLOCK
    micro_batches, place = np.divmod(np.arange(first, min(first + _ROWS_PER_BLOCK, count)), split.micro_batch)
    steps, turn = np.divmod(micro_batches, split.accumulation)
    number = rank + turn * split.world_size
    positions = (start + steps) * split.global_batch + number * split.micro_batch + place
    ids, rows = _samples(folder, data, seed).at(positions)
    return {"position": positions, "sample_id": ids, "tokens": rows.astype(np.int32)}


@cache
def _samples(folder: Path, data: DataConfig, seed: int) -> MappedSamples:
    return MappedSamples(Rows(folder, "train"), sample_order(data, seed=seed))
