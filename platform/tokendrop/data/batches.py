"""A worker's micro batches: rows found by arithmetic from the step, whatever the world size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokendrop.data.ahead import Ahead
from tokendrop.data.pairs import PairMaker
from tokendrop.models.batch import Batch, BertBatch
from tokendrop.schedule.batch import BatchSplit

AnyBatch = TypeVar("AnyBatch", bound=Batch)
MakeBatch = Callable[[NDArray[np.int64], NDArray[np.int64], int], AnyBatch]
"""Makes a micro batch of sample ids (B,), their rows (B, row_length) and its number within the global batch."""


class Samples(Protocol):
    """Training samples by their places in the global sequence of the run."""

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids (B,) and their rows (B, row_length)."""
        ...


class MicroBatches(Generic[AnyBatch]):
    """`Batches` over the rows of a corpus; the next one is read while a worker computes on the last."""

    def __init__(
        self,
        make: MakeBatch[AnyBatch],
        *,
        train: Samples,
        validation: tuple[NDArray[np.int64], NDArray[np.int64]],
        split: BatchSplit,
        rank: int,
    ) -> None:
        """
        Args:
            validation: ids and rows of all held-out samples that are to be read, on every rank the same.
        """
        self.make, self.split, self.rank = make, split, rank
        self.held_out = self._held_out(*validation)
        self._ahead = Ahead(partial(_read, make, train, split))

    def of_step(self, step: int) -> Iterator[AnyBatch]:
        """This worker's micro batches of one step."""
        numbers = self.split.micro_batches(self.rank)
        keys = [*((step, number) for number in numbers), (step + 1, numbers[0])]
        for key, then in pairwise(keys):
            yield self._ahead.get(key, then=then)

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
            batches.append(self.make(ids_N[places], rows_NT[places], number))
        return batches


def _read(
    make: MakeBatch[AnyBatch],
    train: Samples,
    split: BatchSplit,
    key: tuple[int, int],
) -> AnyBatch:
    """Micro batch `number` of a step."""
    step, number = key
    first = step * split.global_batch + number * split.micro_batch
    ids_B, rows_BT = train.at(np.arange(first, first + split.micro_batch))
    return make(ids_B, rows_BT, number)


def text_batch(ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int, *, device: torch.device) -> Batch:
    """Of rows of text: each token's label is the next."""
    tokens = torch.from_numpy(rows_BT).to(device)
    ids = torch.from_numpy(ids_B).to(device)
    return Batch(input_ids_BS=tokens[:, :-1], labels_BS=tokens[:, 1:], sample_ids_B=ids, number=number)


def pair_batch(
    ids_B: NDArray[np.int64], rows_BT: NDArray[np.int64], number: int, *, pairs: PairMaker, device: torch.device
) -> BertBatch:
    """Of pairs of sentences, masked; held-out rows are as `with_mates` gives them where the task is NSP."""
    arrays = asdict(pairs(ids_B, rows_BT))
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return BertBatch(**tensors, sample_ids_B=torch.from_numpy(ids_B).to(device), number=number)
