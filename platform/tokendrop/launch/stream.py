"""Training samples streamed to each rank by Ray Data, in the order that memory-mapped reading has.

Workers need not see the token shards: tasks on nodes that do read them. A rank's samples come by spans of a few
thousand, each a data set of its own, of which the next is begun while one is read: so nothing is planned for the rest
of a run, however long, and nodes that come or go count from the next span on.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from numpy.typing import NDArray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.shards.format import MANIFEST
from tokendrop.errors import UserError
from tokendrop.models.batch import Samples
from tokendrop.schedule.batch import BatchSplit

SPAN = 8192
"""Samples of one rank in a data set, at most, beside those of one step."""

_BLOCK = 512
_READERS = 2  # processes that read for one rank, and as many for its next span: each reads faster than a rank trains
_NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """Which samples one rank trains on, and where their rows are."""

    folder: Path
    config: ExperimentConfig
    split: BatchSplit
    rank: int

    def spans(self, start: int) -> Iterator[range]:
        """The steps from `start` on, in runs of few samples."""
        size, steps = max(1, SPAN // self.per_step), self.config.steps
        return (range(first, min(first + size, steps)) for first in range(start, steps, size))

    @property
    def per_step(self) -> int:
        """Samples of this rank in one step."""
        return self.split.accumulation * self.split.micro_batch

    def positions(self, start: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the run of this rank's samples, by their numbers counted from step `start` on."""
        split = self.split
        micro_batches, place = np.divmod(numbers, split.micro_batch)
        steps, turn = np.divmod(micro_batches, split.accumulation)
        number = split.replica(self.rank) + turn * split.replicas
        return (start + steps) * split.global_batch + number * split.micro_batch + place


class StreamedSamples:
    """`Samples` of a rank: what follows what was asked for last is on its way; to ask for others begins anew."""

    def __init__(self, samples: RankSamples) -> None:
        self.samples = samples
        self._batches: Iterator[Any] = iter(())
        self._next: int | None = None

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids (B,) and rows (B, row_length) of one of this rank's micro batches.

        Raises:
            UserError: no node has the token shards, or one of them is damaged.
        """
        batch = next(self._batches, None) if self._next == positions[0] else None
        if batch is None or not np.array_equal(batch["position"], positions):
            self._batches = _stream(self.samples, int(positions[0]) // self.samples.split.global_batch)
            batch = next(one for one in self._batches if one["position"][0] == positions[0])
            assert np.array_equal(batch["position"], positions), "positions of another rank"
        self._next = self._after(int(positions[0]))
        return batch["sample_id"], batch["tokens"].astype(np.int64)

    def _after(self, position: int) -> int:
        """The first position of the micro batch after the one that begins here."""
        split = self.samples.split
        step, place = divmod(position, split.global_batch)
        turn = (place // split.micro_batch - split.replica(self.samples.rank)) // split.replicas
        number = step * self.samples.per_step + (turn + 1) * split.micro_batch
        return int(self.samples.positions(0, np.array([number]))[0])


def _stream(samples: RankSamples, start: int) -> Iterator[Any]:
    """Micro batches of a rank from a step on."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="stream")
    try:
        coming = None
        for steps in samples.spans(start):
            now, coming = coming, pool.submit(_begin, samples, steps)
            if now is not None:
                yield from now.result()
        if coming is not None:
            yield from coming.result()
    finally:
        pool.shutdown(wait=False)


def _begin(samples: RankSamples, steps: range) -> Iterator[Any]:
    """The micro batches of some steps; they are being read when this returns."""
    count = len(steps) * samples.per_step
    fetch: Any = partial(_fetch, samples=samples, start=steps.start, count=count)
    # No cores of their own: the workers may have booked them all, and reading mapped memory takes little of one. For
    # that reason not `ray.data.range`, whose tasks want cores.
    blocks = [*range(-(-count // _BLOCK))]
    where: dict[str, Any] = {"label_selector": selector} if (selector := _nodes_with(samples.folder)) else {}
    stream = ray.data.from_items(blocks, override_num_blocks=len(blocks)).map_batches(
        fetch, batch_size=1, num_cpus=0, compute=ray.data.TaskPoolStrategy(size=_READERS), **where
    )
    stream.context.execution_options.preserve_order = True
    stream.context.enable_progress_bars = False
    batches = iter(stream.iter_batches(batch_size=samples.split.micro_batch, batch_format="numpy"))
    return chain([next(batches)], batches)


def _nodes_with(folder: Path) -> dict[str, str]:
    """The label of the nodes that see the token shards; nothing where all of them do."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    look = ray.remote(num_cpus=0, max_retries=0)(_has_shards)
    there = [NodeAffinitySchedulingStrategy(one, soft=False) for one in nodes]
    looks = [look.options(scheduling_strategy=one).remote(folder) for one in there]
    seeing = [one for one, sees in zip(nodes, map(_answer, looks), strict=True) if sees]
    if not seeing:
        raise UserError(f"data.folder: no machine of this cluster sees {folder}; want a folder that one of them has")
    return {} if len(seeing) == len(nodes) else {_NODE_LABEL: f"in({','.join(seeing)})"}


def _answer(look: Any) -> bool:
    try:
        return ray.get(look)
    except RayError:  # the node went away
        return False


def _has_shards(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _fetch(
    batch: dict[str, NDArray[np.int64]], *, samples: RankSamples, start: int, count: int
) -> dict[str, NDArray[Any]]:
    """The samples of one block of a span, which has `count` samples."""
    first = int(batch["item"][0]) * _BLOCK
    positions = samples.positions(start, np.arange(first, min(first + _BLOCK, count)))
    ids, rows = _opened(samples.folder, samples.config).at(positions)
    return {"position": positions, "sample_id": ids, "tokens": rows.astype(np.int32)}


@cache
def _opened(folder: Path, config: ExperimentConfig) -> Samples:
    return config.task.build(config).open(folder).samples
