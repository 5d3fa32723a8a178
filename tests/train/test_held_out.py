"""Held-out loss: the mean over the rows, however they are split into batches and shared out."""

import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from groups import together
from tiny import TOKENS, experiment
from tokendrop.data.read.batches import HeldOutBatches
from tokendrop.models.build import build_model
from tokendrop.tasks.causal_lm import text_batch
from tokendrop.train.held_out import held_out_mean
from tokendrop.train.worker import build_engine

EXACT = 1e-12  # float64
CPU = torch.device("cpu")
STRATEGIES = ("ddp", "fsdp")
SPLITS = list(product((1, 2, 3, 8), (1, 3, 4, 7, 11)))  # micro batch, held-out rows


def held_out(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample ids and rows; each row has tokens of its own."""
    rng = np.random.default_rng(5)
    return np.arange(count), rng.integers(0, 50, (count, TOKENS + 1))


def loss_of(strategy: str, *, micro_batch: int, rows: int, world_size: int = 1, rank: int = 0) -> float:
    engine, dropping = build_engine(experiment(train__strategy=strategy), CPU)
    assert dropping is not None
    dropping.draw(kept_length=4, step=0, sample_ids=torch.arange(rows), sequence_length=TOKENS)
    share = HeldOutBatches(text_batch, *held_out(rows), micro_batch=micro_batch, world_size=world_size, rank=rank)
    return held_out_mean(engine, share)[0]


@cache
def row_by_row(rows: int) -> float:
    """The mean over the rows by the plain model, one at a time."""
    config = experiment()
    model = build_model(config.model, seed=config.seed).double().eval()
    with torch.no_grad():
        losses = [model(row[None, :-1], row[None, 1:]).item() for row in torch.from_numpy(held_out(rows)[1])]
    return float(np.mean(losses))


@given(micro_batch=st.integers(1, 12), rows=st.integers(1, 12))
@settings(max_examples=20)
def test_any_micro_batch_gives_the_mean_over_the_rows(micro_batch: int, rows: int) -> None:
    assert loss_of("ddp", micro_batch=micro_batch, rows=rows) == pytest.approx(row_by_row(rows), rel=EXACT)


@given(micro_batch=st.integers(1, 4), rows=st.integers(1, 40), world_size=st.integers(1, 4), first=st.integers(1, 3))
def test_the_first_batches_of_all_workers_are_the_first_rows(
    micro_batch: int, rows: int, world_size: int, first: int
) -> None:
    """By which a probe reads the same rows at any world size."""
    sizes = {"micro_batch": micro_batch, "world_size": world_size}
    shares = [HeldOutBatches(text_batch, *held_out(rows), **sizes, rank=rank) for rank in range(world_size)]
    parts = [share[:first] for share in shares]
    assert len({len(part) for part in parts}) == 1
    read = [one for part in parts for batch, counts in part if counts for one in batch.sample_ids_B.tolist()]
    assert sorted(read) == [*range(min(rows, first * micro_batch * world_size))]


def losses_together(folder: Path) -> None:
    """What each worker of a group does: all strategies and splits, for there are few enough."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found = [
        loss_of(strategy, micro_batch=micro_batch, rows=rows, world_size=size, rank=rank)
        for strategy in STRATEGIES
        for micro_batch, rows in SPLITS
    ]
    (folder / f"{size}-{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_world_size_gives_the_mean_over_the_rows(tmp_path: Path, world_size: int) -> None:
    """Under FSDP too, where a worker that ran fewer batches than the others would keep them waiting."""
    together(world_size, losses_together, tmp_path)
    expected = [row_by_row(rows) for _ in STRATEGIES for _, rows in SPLITS]
    for rank in range(world_size):
        assert json.loads((tmp_path / f"{world_size}-{rank}.json").read_text()) == pytest.approx(expected, rel=EXACT)
