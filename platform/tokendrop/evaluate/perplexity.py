"""Loss on a run's own held-out rows."""

from pathlib import Path
from typing import Any

import torch

from tokendrop.data.rows import Rows, held_out_ids
from tokendrop.errors import UserError
from tokendrop.evaluate.load import load_run, locate
from tokendrop.models.gpt import Gpt
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.device import pick_device
from tokendrop.train.report import perplexity

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
    rows = Rows(data, "validation")
    ids = held_out_ids(config.data, rows.committed, config.evaluate.sequences)
    if len(ids) == 0:
        raise UserError(f"{data}: it holds no validation rows")
    size = max(1, _BATCH_TOKENS // config.model.sequence_length)
    total = 0.0
    for first in range(0, len(ids), size):
        some = ids[first : first + size]
        tokens = torch.from_numpy(rows.read(some)).to(model.tokens.weight.device)
        total += model(tokens[:, :-1], tokens[:, 1:]).item() * len(some)
    return {"val_loss": total / len(ids), "perplexity": perplexity(total / len(ids)), "rows": len(ids)}
