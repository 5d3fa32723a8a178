"""Means over several batches: the same number however samples are split into batches and shared out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokendrop.models.batch import Batch
from tokendrop.train.engines.base import Engine


def held_out_mean(
    engine: Engine, batches: Sequence[tuple[Batch, int]], *, before: Callable[[Batch], None] = lambda batch: None
) -> tuple[float, dict[str, float]]:
    """Mean loss on held-out rows over all workers, each batch weighted by how many of its rows count; and figures.

    Sums are in float64, so that how rows are split into batches and shared out does not show.

    Args:
        before: told each batch before it is evaluated.
    """
    has_labels = batches[0][0].labels() is not None
    per_sample = labels_per_sample(engine, batches) if has_labels else None
    names: tuple[str, ...] = ()
    sums: list[Tensor] = []
    for batch, counts in batches:
        before(batch)
        loss = engine.evaluate(batch if per_sample is None else batch.weighed(per_sample))
        names = tuple(loss.figures)
        parts = [part.double() * bool(counts) for figure in loss.figures.values() for part in figure]
        mean = loss.mean.double()
        sums.append(torch.stack([mean * counts, torch.full_like(mean, counts), *parts]))
    total, rows, *figures = engine.mean(torch.stack(sums).sum(0)).tolist()
    means = [total / count for total, count in zip(figures[::2], figures[1::2], strict=True)]
    return total / rows, dict(zip(names, means, strict=True))


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
