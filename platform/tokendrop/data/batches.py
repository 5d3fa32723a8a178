"""A worker's micro batches: rows found by arithmetic from the step, whatever the world size."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokendrop.data.order import sample_ids
from tokendrop.models.batch import Batch
from tokendrop.schedule.batch import BatchSplit


class RowSource(Protocol):
    """Rows of one split by number."""

    def __len__(self) -> int: ...

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows by number, (len(rows), sequence_length + 1)."""
        ...


class RowBatches:
    """`Batches` over the rows of a corpus."""

    def __init__(
        self,
        *,
        train: RowSource,
        validation: RowSource,
        split: BatchSplit,
        rank: int,
        seed: int,
        validation_rows: int,
        device: torch.device,
    ) -> None:
        self.train, self.split, self.rank, self.seed, self.device = train, split, rank, seed, device
        self.held_out = self._held_out(validation, validation_rows)

    def of_step(self, step: int) -> Iterator[Batch]:
        """This worker's micro batches of one step."""
        split = self.split
        for number in split.micro_batches(self.rank):
            first = step * split.global_batch + number * split.micro_batch
            positions = np.arange(first, first + split.micro_batch)
            ids = sample_ids(positions, rows=len(self.train), seed=self.seed)
            yield self._batch(self.train.read(ids % len(self.train)), ids, number)

    def validation(self) -> Sequence[Batch]:
        return self.held_out

    def _held_out(self, rows: RowSource, wanted: int) -> list[Batch]:
        """The first held-out rows in micro batches of one size, shared out as those of a step are.

        So all workers together read the same rows whatever their number, and each reads as many. Where fewer
        rows were held out than a step has micro batches, some come twice.
        """
        split = self.split
        in_step = split.global_batch // split.micro_batch
        wanted = min(wanted, len(rows))
        size = max(1, min(split.micro_batch, wanted // in_step))
        batches: list[Batch] = []
        for number in range(self.rank, in_step * max(1, wanted // (size * in_step)), split.world_size):
            numbers = np.arange(number * size, (number + 1) * size) % len(rows)
            batches.append(self._batch(rows.read(numbers), numbers, number))
        return batches

    def _batch(self, rows_BT: NDArray[np.int64], ids_B: NDArray[np.int64], number: int) -> Batch:
        tokens = torch.from_numpy(rows_BT).to(self.device)
        return Batch(
            input_ids_BS=tokens[:, :-1],
            labels_BS=tokens[:, 1:],
            sample_ids_B=torch.from_numpy(ids_B).to(self.device),
            number=number,
        )
