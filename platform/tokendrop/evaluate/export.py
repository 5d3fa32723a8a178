"""A checkpoint as a model of the ecosystem, to be used without us."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tokendrop.atomic import atomic_folder
from tokendrop.data.tokenizer import CLS, END_OF_TEXT, MASK, PAD, SEP, UNKNOWN, pair_template
from tokendrop.errors import UserError
from tokendrop.evaluate.load import load_run, locate
from tokendrop.track.run_folder import open_run_folder


def export_checkpoint(path: Path, to: Path) -> tuple[Path, str]:
    """Write the model of a run or a checkpoint as a Hugging Face folder with the same outputs.

    Args:
        path: a run folder, for its newest checkpoint, or a checkpoint.
        to: the folder to make; it appears whole or not at all.
    Returns:
        `to`, as an absolute path, and the expression that reads what it holds.
    Raises:
        UserError: there is no checkpoint, the target holds something, or Hugging Face has no such model.
    """
    to = to.resolve()
    check_free(to)
    model, tokenizer, task = load_run(path)
    config, _ = open_run_folder(locate(path)[1])
    if config.drop.learns:
        raise UserError(
            f"{path}: its drop.method '{config.drop.method}' has a router, which no format of others has; want one of"
            " another method"
        )
    with atomic_folder(to) as partial:
        try:
            call = task.export(model, tokenizer, partial).replace("FOLDER", str(to))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if config.task.reads != "images":
            as_fast_tokenizer(tokenizer, config.model.sequence_length).save_pretrained(partial)
        for weights in partial.glob("*.safetensors"):  # its writer keeps everybody else from reading
            weights.chmod((partial / "config.json").stat().st_mode)
    return to, call


def as_fast_tokenizer(tokenizer: Tokenizer, sequence_length: int) -> PreTrainedTokenizerFast:
    """The run's tokenizer as transformers wants it.

    Its post-processor puts around a text what training had there: of text nothing, of pairs [CLS] A [SEP] B [SEP].
    """
    plain = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "post_processor": None}))
    special: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    if plain.token_to_id(CLS) is not None and plain.token_to_id(END_OF_TEXT) is None:
        special = {"pad_token": PAD, "unk_token": UNKNOWN, "cls_token": CLS, "sep_token": SEP, "mask_token": MASK}
        special["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        plain = pair_template(plain)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, model_max_length=sequence_length, clean_up_tokenization_spaces=False, **special
    )


def check_free(to: Path) -> None:
    """Raises UserError where something lies at `to` already; an empty folder is nothing."""
    if to.is_mount():
        raise UserError(f"{to}: a mount point, which nothing can be moved to; want a new folder in it")
    if to.is_dir() and not any(to.iterdir()):
        return
    if to.exists():
        raise UserError(f"{to}: something is there already; want a new or an empty folder")
