"""Loss on a run's own held-out rows."""

from pathlib import Path
from typing import Any

import torch

from tokendrop.data.read.batches import held_out_batches
from tokendrop.errors import UserError
from tokendrop.evaluate.load import load_run, locate
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.device import computes_in_bf16, pick_device, pick_dtype
from tokendrop.train.engines.base import Engine
from tokendrop.train.held_out import held_out_mean
from tokendrop.train.optimizer import build_optimizers


def validation_perplexity(path: Path) -> dict[str, Any]:
    """Loss of a run's or a checkpoint's model on the run's held-out rows, with no token dropped.

    It is what training reports: the same rows, micro batches and precision, the latter float32 where this device
    has no bf16.

    Returns:
        `val_loss`, the task's figures, such as `perplexity`, and `rows` read: the first `evaluate.sequences` of them.
    Raises:
        UserError: there is no checkpoint, or the run's token shards are gone.
    """
    _, run = locate(path)
    config, data = open_run_folder(run)
    opened = config.task.build(config).open(data)
    ids, rows = opened.held_out()
    if len(ids) == 0:
        raise UserError(f"{data}: it holds no validation rows")
    device = pick_device()
    dtype = precision_here(config.train.precision, device)
    model, _, task = load_run(path, torch.promote_types(dtype, torch.float32))
    engine = Engine(model.to(device), build_optimizers(model, config.train), dtype, loss=task.loss)
    batches = held_out_batches(opened.batch, ids, rows, micro_batch=config.train.micro_batch)
    loss, figures = held_out_mean(engine, ((batch.to(device), counts) for batch, counts in batches))
    return {"val_loss": loss, **config.task.figures(loss, figures), "rows": len(ids)}


def precision_here(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products of a job's precision; a model that was trained in bf16 can be evaluated anywhere."""
    return pick_dtype("auto" if precision == "bf16" and not computes_in_bf16(device) else precision, device)
