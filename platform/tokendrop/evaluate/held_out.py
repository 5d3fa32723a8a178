"""A model on its run's own held-out rows."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokendrop.data.read.batches import HeldOutBatches
from tokendrop.data.shards.cache import folder_here
from tokendrop.data.shards.format import Split
from tokendrop.errors import UserError
from tokendrop.evaluate.load import load_run, locate
from tokendrop.models.batch import Batch
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.device import computes_in_bf16, pick_device, pick_dtype
from tokendrop.train.engines.base import Engine
from tokendrop.train.held_out import held_out_mean
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.task import Loss


def held_out_figures(path: Path, split: Split = "validation") -> dict[str, Any] | None:
    """Loss of a run's or a checkpoint's model on rows that its run has held out, with no token dropped.

    Of validation, it is what training reports: the same rows, micro batches and precision, the latter float32 where
    this device has no bf16.

    Returns:
        `val_loss` or `test_loss`, the task's figures, such as `perplexity`, and `rows` read: the first
        `evaluate.sequences` of them. None where there are no rows for tests.
    Raises:
        UserError: there is no checkpoint, or the run's token shards are gone or hold no rows for validation.
    """
    _, run = locate(path)
    config, data = open_run_folder(run)
    opened = config.task.build(config).open(folder_here(config.data, data))
    ids, rows = opened.held_out(split)
    if len(ids) == 0:
        if split == "test":
            return None
        raise UserError(f"{data}: it holds no {split} rows")
    device = pick_device()
    dtype = precision_here(config.train.precision, device)
    model, tokenizer, task = load_run(path, torch.promote_types(dtype, torch.float32))
    outputs: list[Tensor] = []

    def loss_of(model: nn.Module, batch: Batch) -> Loss:
        loss = task.loss(model, batch)
        outputs.extend([] if loss.outputs is None else [loss.outputs.cpu()])
        return loss

    engine = Engine(model.to(device), build_optimizers(model, config.train), dtype, loss=loss_of)
    batches = HeldOutBatches(opened.batch, ids, rows, micro_batch=config.train.micro_batch, device=device)
    loss, figures = held_out_mean(engine, batches)
    judged = opened.judge(split, loss, torch.cat(outputs) if outputs else None, tokenizer)
    name = "val_loss" if split == "validation" else "test_loss"
    return {name: loss, **config.task.figures(loss, figures), **judged, "rows": len(ids)}


def precision_here(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products of a job's precision; a model that was trained in bf16 can be evaluated anywhere."""
    return pick_dtype("auto" if precision == "bf16" and not computes_in_bf16(device) else precision, device)
