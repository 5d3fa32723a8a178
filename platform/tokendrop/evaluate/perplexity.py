"""Loss on a run's own held-out rows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokendrop.data.shards import Rows, read_manifest
from tokendrop.errors import UserError
from tokendrop.evaluate.load import load_run, locate
from tokendrop.models.gpt import Gpt
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.device import pick_device

_BATCH_TOKENS = 2**14


def validation_perplexity(path: Path) -> dict[str, Any]:
    """Loss of a run's or a checkpoint's model on the run's held-out rows, in float32, with no token dropped.

    Returns:
        `val_loss` (nats per token), `perplexity`, and `rows` read: the first `evaluate.sequences` of them.
    Raises:
        UserError: there is no checkpoint, or the run's token shards are gone.
    """
    _, run = locate(path)
    model, _ = load_run(path)
    return held_out_loss(model.to(pick_device()), run)


@torch.inference_mode()
def held_out_loss(model: Gpt, run: Path) -> dict[str, Any]:
    """`validation_perplexity` for a model at hand, in eval mode, on the rows of the run folder `run`."""
    config, data = open_run_folder(run)
    manifest = read_manifest(data)
    rows = Rows(data, manifest, "validation")
    count = min(len(rows), config.evaluate.sequences)
    if count == 0:
        raise UserError(f"{data}: it holds no validation rows")
    size = max(1, _BATCH_TOKENS // manifest.sequence_length)
    total = 0.0
    for first in range(0, count, size):
        numbers = np.arange(first, min(first + size, count))
        tokens = torch.from_numpy(rows.read(numbers)).to(model.tokens.weight.device)
        total += model(tokens[:, :-1], tokens[:, 1:]).item() * len(numbers)
    return {"val_loss": total / count, "perplexity": math.exp(total / count), "rows": count}
