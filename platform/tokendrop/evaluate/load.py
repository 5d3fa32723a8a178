"""From a run folder or a checkpoint to the model and tokenizer in it."""

import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from tokendrop.data.tokenizer import load_tokenizer
from tokendrop.track.run_folder import check_model, open_run_folder, tokenizer_of
from tokendrop.train.checkpoint_index import latest_checkpoint
from tokendrop.train.dropping import attach_method
from tokendrop.train.reader import load_weights
from tokendrop.train.task import Task


def locate(path: Path) -> tuple[Path, Path]:
    """The checkpoint that `path` means, and the folder of its run.

    Args:
        path: a run folder, for its newest checkpoint, or a checkpoint.
    Raises:
        UserError: there is no committed checkpoint.
    """
    checkpoint = latest_checkpoint(path.absolute())
    return checkpoint, checkpoint.parent.parent


def load_run(path: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tokenizer, Task]:
    """The model of a run or a checkpoint, on the CPU and in eval mode, its tokenizer and its task.

    Raises:
        UserError: there is no checkpoint, no run around it, or a model of another kind in it.
        DamagedDataError: a file of them is damaged.
    """
    checkpoint, run = locate(path)
    tokenizer = tokenizer_of(run)
    config, _ = open_run_folder(run)
    check_model(checkpoint, config)
    task = config.task.build(config)
    model = task.build_model(seed=0).to(dtype)
    if config.drop.learns:
        attach_method(config, model, task.layers(model))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what we want
        load_weights(model, checkpoint)
    return model.eval(), load_tokenizer(tokenizer, config.task.reads), task
