"""A worker's micro batches: rows found by arithmetic from the step, whatever the world size."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokendrop.data.read.prefetch import Prefetcher
from tokendrop.models.batch import Batch, HeldOut, Samples
from tokendrop.schedule.batch import BatchSplit

AnyBatch = TypeVar("AnyBatch", bound=Batch)
MakeBatch = Callable[[NDArray[np.int64], NDArray[np.int64], int], AnyBatch]
"""Makes a micro batch of sample ids (B,), their rows (B, row_length) and its number within the global batch."""


_HOST = torch.device("cpu")


class MicroBatches(Generic[AnyBatch]):
    """`Batches` over the rows of a corpus; the next is read, and copied to a GPU, during the last."""

    def __init__(
        self,
        make: MakeBatch[AnyBatch],
        *,
        train: Samples,
        validation: HeldOut,
        split: BatchSplit,
        rank: int,
        device: torch.device = _HOST,
    ) -> None:
        """
        Args:
            make: makes a micro batch on the host.
            device: where the worker computes.
            validation: ids and rows of all held-out samples that are to be read, on every rank the same.
        """
        self.make, self.split, self.rank = make, split, rank
        sizes = {"micro_batch": split.micro_batch, "world_size": split.replicas, "rank": split.replica(rank)}
        self.held_out = HeldOutBatches(make, *validation, **sizes, device=device)
        self._copies = CopyStream(device) if device.type == "cuda" else None
        self._ahead = Prefetcher(partial(_read, make, train, split, self._copies))

    def of_step(self, step: int) -> Iterator[AnyBatch]:
        """This worker's micro batches of one step."""
        numbers = self.split.micro_batches(self.rank)
        keys = [*((step, number) for number in numbers), (step + 1, numbers[0])]
        for key, then in pairwise(keys):
            batch, copied = self._ahead.get(key, then=then)
            if self._copies is not None and copied is not None:
                self._copies.wait(batch, copied)
            yield batch

    def validation(self) -> Sequence[tuple[AnyBatch, int]]:
        """Batches of held-out rows, each with its number of them."""
        return self.held_out


class HeldOutBatches(Sequence[tuple[AnyBatch, int]]):
    """A worker's share of the held-out rows in micro batches, each with how many of its rows count.

    Over all workers every row counts once. Each worker gets as many batches, for workers that share their weights
    out gather them together: where there are too few, the first batch comes again and counts for nothing. A batch is
    made when it is asked for: images take too much room for all at once.
    """

    def __init__(
        self,
        make: MakeBatch[AnyBatch],
        ids_N: NDArray[np.int64],
        rows_NT: NDArray[np.int64],
        *,
        micro_batch: int,
        world_size: int = 1,
        rank: int = 0,
        device: torch.device = _HOST,
    ) -> None:
        self.make, self.ids_N, self.rows_NT, self.device = make, ids_N, rows_NT, device
        self.micro_batch = micro_batch
        batches = -(-len(ids_N) // micro_batch)
        self._numbers = [
            number if number < batches else None
            for number in range(rank, -(-batches // world_size) * world_size, world_size)
        ]
        """Of the batches among all; None for one that counts for nothing."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            part = copy(self)
            part._numbers = self._numbers[place]
            return part
        number = self._numbers[place]
        first = (number or 0) * self.micro_batch
        some = slice(first, first + self.micro_batch)
        batch = self.make(self.ids_N[some], self.rows_NT[some], number or 0)
        return batch.to(self.device), 0 if number is None else len(batch.sample_ids_B)


class CopyStream:
    """Copies micro batches to a GPU on a stream of their own, beside what is computed there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def copy(self, batch: AnyBatch) -> tuple[AnyBatch, torch.Event]:
        """The batch on the GPU, and what says that it is whole there; the host waits for neither."""
        torch.cuda.set_device(self.device)  # of this thread, which else would take up the first GPU
        with torch.cuda.stream(self.stream):
            batch = batch.to(self.device)
            return batch, self.stream.record_event()

    def wait(self, batch: Batch, copied: torch.Event) -> None:
        """Let what is computed from now on wait for a copied batch; the host does not."""
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        for value in batch.inputs().values():
            value.record_stream(computing)  # else its memory would be free for the next copy too early


def _read(
    make: MakeBatch[AnyBatch],
    train: Samples,
    split: BatchSplit,
    copies: CopyStream | None,
    key: tuple[int, int],
) -> tuple[AnyBatch, torch.Event | None]:
    """Micro batch `number` of a step, where the model reads it."""
    step, number = key
    first = step * split.global_batch + number * split.micro_batch
    ids_B, rows_BT = train.at(np.arange(first, first + split.micro_batch))
    batch = make(ids_B, rows_BT, number)
    return (batch, None) if copies is None else copies.copy(batch)
