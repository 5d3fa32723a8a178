"""Training rows streamed to each rank by Ray Data, in the order that memory-mapped reading has."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
import ray.train
from numpy.typing import NDArray

from tokendrop.data.order import sample_ids
from tokendrop.data.shards import Rows, read_manifest
from tokendrop.launch.worker import WorkerTask
from tokendrop.schedule.batch import BatchSplit
from tokendrop.track.run_folder import CHECKPOINTS
from tokendrop.train.checkpoint import committed, read_meta

STREAM = "rows"
_ROWS_PER_BLOCK = 512


class RowStreams(ray.train.DataConfig):
    """One ordered stream of rows a rank, from the step of the last checkpoint on.

    Ray Train asks for the streams anew for each worker group, and so after each loss of a worker or change of the
    world size: Ray's own iterators have no state, but the order of samples needs none.
    """

    def __init__(self, task: WorkerTask) -> None:
        super().__init__()
        self.task = task

    def configure(self, datasets: Any, world_size: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        saved = committed(self.task.run / CHECKPOINTS)
        start = read_meta(saved[-1])["step"] if saved else 0
        split = replace(self.task.config.plan().batch, world_size=world_size)
        return [{STREAM: self._stream(split, rank, start).iterator()} for rank in range(world_size)]

    def _stream(self, split: BatchSplit, rank: int, start: int) -> ray.data.Dataset:
        config = self.task.config
        per_step = split.accumulation * split.micro_batch
        count = (config.steps - start) * per_step
        fetch: Any = partial(_fetch, folder=self.task.data, seed=config.seed, split=split, rank=rank, start=start)
        # no cores of its own: the workers may have booked them all, and reading mapped memory takes little of one
        stream = ray.data.range(count, override_num_blocks=-(-count // _ROWS_PER_BLOCK)).map_batches(fetch, num_cpus=0)
        stream.context.execution_options.preserve_order = True
        stream.context.enable_progress_bars = False
        return stream


class StreamedRows:
    """A rank's stream in the place of `Rows`: it gives the rows that are asked for, and only in their order."""

    def __init__(self, stream: ray.data.DataIterator, *, rows: int, micro_batch: int) -> None:
        self._rows = rows
        self._batches: Iterator[Any] = iter(stream.iter_batches(batch_size=micro_batch, batch_format="numpy"))

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The next rows of the stream, (len(rows), sequence_length + 1); raises RuntimeError if others come."""
        batch = next(self._batches)
        if not np.array_equal(batch["row"], rows):
            raise RuntimeError(f"the stream gave rows {batch['row'].tolist()}, wanted {rows.tolist()}")
        return batch["tokens"].astype(np.int64)


def _fetch(
    batch: dict[str, NDArray[np.int64]], *, folder: Path, seed: int, split: BatchSplit, rank: int, start: int
) -> dict[str, NDArray[Any]]:
    """The rows at some places of a rank's stream."""
    rows = _rows(folder)
    micro_batches, place = np.divmod(batch["id"], split.micro_batch)
    steps, turn = np.divmod(micro_batches, split.accumulation)
    number = rank + turn * split.world_size
    positions = (start + steps) * split.global_batch + number * split.micro_batch + place
    row = sample_ids(positions, rows=len(rows), seed=seed) % len(rows)
    return {"row": row, "tokens": rows.read(row).astype(np.int32)}


@cache
def _rows(folder: Path) -> Rows:
    return Rows(folder, read_manifest(folder), "train")
