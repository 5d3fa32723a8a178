"""From a run folder or a checkpoint to the model and tokenizer in it."""

import warnings
from pathlib import Path

from tokenizers import Tokenizer

from tokendrop.config.load import build
from tokendrop.config.model import BertConfig, GptConfig
from tokendrop.data.shards import TOKENIZER
from tokendrop.data.tokenizer import load_tokenizer
from tokendrop.errors import UserError
from tokendrop.models.build import build_model
from tokendrop.models.gpt import Gpt
from tokendrop.track.run_folder import latest_checkpoint
from tokendrop.train.checkpoint import load_weights
from tokendrop.train.committed import read_meta


def locate(path: Path) -> tuple[Path, Path]:
    """The checkpoint that `path` means, and the folder of its run.

    Args:
        path: a run folder, for its newest checkpoint, or a checkpoint.
    Raises:
        UserError: there is no committed checkpoint.
    """
    checkpoint = latest_checkpoint(path.absolute())
    return checkpoint, checkpoint.parent.parent


def load_run(path: Path) -> tuple[Gpt, Tokenizer]:
    """The model of a run or a checkpoint, float32 on the CPU and in eval mode, and its tokenizer.

    Raises:
        UserError: there is no checkpoint, no tokenizer beside it, or a model of another kind in it.
    """
    checkpoint, run = locate(path)
    if not (run / TOKENIZER).is_file():
        raise UserError(f"{run}: no {TOKENIZER} in it; want a checkpoint inside the run folder that made it")
    tokenizer = load_tokenizer(run / TOKENIZER)
    model = build_model(model_config(checkpoint), seed=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what we want
        load_weights(model, checkpoint)
    return model.eval(), tokenizer


def model_config(checkpoint: Path) -> GptConfig | BertConfig:
    """The configuration of a checkpoint's model; its sizes count, the name of its preset does not."""
    saved = {key: value for key, value in read_meta(checkpoint)["model"].items() if key != "preset"}
    return build(GptConfig | BertConfig, saved, f"{checkpoint}: model")
