"""Loss on held-out rows: the same number in training and in `tokendrop evaluate`."""

from collections.abc import Iterable

import torch

from tokendrop.models.batch import Batch
from tokendrop.train.engines.base import Engine


def held_out_mean(engine: Engine, batches: Iterable[tuple[Batch, int]]) -> float:
    """Mean loss over all workers' rows, each batch weighted by how many of its rows count.

    Sums are in float64, so that how rows are split into batches and shared out does not show.
    """
    losses, rows = [], []
    for batch, counts in batches:
        losses.append(engine.evaluate(batch).double())
        rows.append(counts)
    weights = torch.tensor(rows, dtype=torch.float64).to(losses[0].device)
    total, count = engine.mean(torch.stack([torch.stack(losses) @ weights, weights.sum()])).tolist()
    return total / count
