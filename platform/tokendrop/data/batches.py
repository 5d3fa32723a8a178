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
        sizes = {"micro_batch": split.micro_batch, "world_size": split.world_size}
        self.held_out = held_out_batches(make, *validation, **sizes, rank=rank)
        self._ahead = Ahead(partial(_read, make, train, split))

    def of_step(self, step: int) -> Iterator[AnyBatch]:
        """This worker's micro batches of one step."""
        numbers = self.split.micro_batches(self.rank)
        keys = [*((step, number) for number in numbers), (step + 1, numbers[0])]
        for key, then in pairwise(keys):
            yield self._ahead.get(key, then=then)

    def validation(self) -> Sequence[tuple[AnyBatch, int]]:
        return self.held_out


def held_out_batches(
    make: MakeBatch[AnyBatch],
    ids_N: NDArray[np.int64],
    rows_NT: NDArray[np.int64],
    *,
    micro_batch: int,
    world_size: int = 1,
    rank: int = 0,
) -> list[tuple[AnyBatch, int]]:
    """A worker's share of the held-out rows in micro batches, each with how many of its rows count.

    Over all workers every row counts once. Each worker gets as many batches, for workers that share their weights
    out gather them together: where there are too few, the first batch comes again and counts for nothing.
    """
    firsts = list(range(0, len(ids_N), micro_batch))
    shares: list[tuple[AnyBatch, int]] = []
    for number in range(rank, -(-len(firsts) // world_size) * world_size, world_size):
        is_padding = number >= len(firsts)
        first = 0 if is_padding else firsts[number]
        some = slice(first, first + micro_batch)
        shares.append((make(ids_N[some], rows_NT[some], number), 0 if is_padding else len(ids_N[some])))
    return shares


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
