"""A worker's micro batches: rows found by arithmetic from the step, whatever the world size."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokendrop.data.pairs import PairMaker
from tokendrop.models.batch import Batch, BertBatch
from tokendrop.schedule.batch import BatchSplit

AnyBatch = TypeVar("AnyBatch", bound=Batch)


class Samples(Protocol):
    """Training samples by their places in the global sequence of the run."""

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids (B,) and their rows (B, row_length)."""
        ...


class _MicroBatches(ABC, Generic[AnyBatch]):
    """`Batches` over the rows of a corpus."""

    def __init__(
        self,
        *,
        train: Samples,
        validation: tuple[NDArray[np.int64], NDArray[np.int64]],
        split: BatchSplit,
        rank: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            validation: ids and rows of all held-out samples that are to be read, on every rank the same.
        """
        self.train, self.split, self.rank, self.device = train, split, rank, device
        self.held_out = self._held_out(*validation)

    def of_step(self, step: int) -> Iterator[AnyBatch]:
        """This worker's micro batches of one step."""
        split = self.split
        for number in split.micro_batches(self.rank):
            first = step * split.global_batch + number * split.micro_batch
            positions = np.arange(first, first + split.micro_batch)
            ids_B, rows_BT = self.train.at(positions)
            yield self._batch(rows_BT, ids_B, number)

    def validation(self) -> Sequence[AnyBatch]:
        return self.held_out

    def _held_out(self, ids_N: NDArray[np.int64], rows_NT: NDArray[np.int64]) -> list[AnyBatch]:
        """The held-out rows in micro batches of one size, shared out as those of a step are.

        So all workers together read the same rows whatever their number, and each reads as many. Where fewer
        rows were held out than a step has micro batches, some come twice.
        """
        split = self.split
        in_step = split.global_batch // split.micro_batch
        size = max(1, min(split.micro_batch, len(rows_NT) // in_step))
        batches: list[AnyBatch] = []
        for number in range(self.rank, in_step * max(1, len(rows_NT) // (size * in_step)), split.world_size):
            places = np.arange(number * size, (number + 1) * size) % len(rows_NT)
            batches.append(self._batch(rows_NT[places], ids_N[places], number))
        return batches

    @abstractmethod
    def _batch(self, rows_BT: NDArray[np.int64], ids_B: NDArray[np.int64], number: int) -> AnyBatch: ...


class RowBatches(_MicroBatches[Batch]):
    """Rows of text: each token's label is the next."""

    def _batch(self, rows_BT: NDArray[np.int64], ids_B: NDArray[np.int64], number: int) -> Batch:
        tokens = torch.from_numpy(rows_BT).to(self.device)
        return Batch(
            input_ids_BS=tokens[:, :-1],
            labels_BS=tokens[:, 1:],
            sample_ids_B=torch.from_numpy(ids_B).to(self.device),
            number=number,
        )


class PairBatches(_MicroBatches[BertBatch]):
    """Pairs of sentences, masked."""

    def __init__(
        self,
        make: PairMaker,
        *,
        train: Samples,
        validation: tuple[NDArray[np.int64], NDArray[np.int64]],
        split: BatchSplit,
        rank: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            validation: as for rows of text; rows as `with_mates` gives them where the task is NSP.
        """
        self.make = make
        super().__init__(train=train, validation=validation, split=split, rank=rank, device=device)

    def _batch(self, rows_BT: NDArray[np.int64], ids_B: NDArray[np.int64], number: int) -> BertBatch:
        arrays = asdict(self.make(ids_B, rows_BT))
        tensors = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        return BertBatch(**tensors, sample_ids_B=torch.from_numpy(ids_B).to(self.device), number=number)
