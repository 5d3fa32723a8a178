"""Means over several batches: the same number however samples are split into batches and shared out."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tokendrop.models.batch import Batch
from tokendrop.train.engines.base import Engine


def held_out_mean(engine: Engine, batches: Iterable[tuple[Batch, int]]) -> float:
    """Mean loss on held-out rows over all workers, each batch weighted by how many of its rows count.

    Sums are in float64, so that how rows are split into batches and shared out does not show.
    """
    everything = list(batches)
    if everything[0][0].labels() is not None:
        mean = labels_per_sample(engine, everything)
        everything = [(batch.weighed(mean), counts) for batch, counts in everything]
    losses = torch.stack([engine.evaluate(batch).double() for batch, _ in everything])
    weights = torch.tensor([counts for _, counts in everything], dtype=torch.float64).to(losses.device)
    total, count = engine.mean(torch.stack([losses @ weights, weights.sum()])).tolist()
    return total / count


def labels_per_sample(engine: Engine, batches: Sequence[tuple[Batch, int]]) -> Tensor:
    """Over the batches of all workers, a scalar in float64; for batches that have `labels`.

    Args:
        batches: each with how many of its samples count, all or none.
    """
    labels = [batch.labels() for batch, _ in batches]
    counts = [(count * bool(some)) for count, (_, some) in zip(labels, batches, strict=True) if count is not None]
    sums = torch.stack(counts).sum().double()
    samples = torch.full_like(sums, sum(some for _, some in batches))
    total, number = engine.mean(torch.stack([sums, samples])).unbind()
    return total / number
