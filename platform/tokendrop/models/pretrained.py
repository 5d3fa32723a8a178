"""Hugging Face's GPT-2 with the same function as our GPT, and the way back."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tokendrop.errors import UserError
from tokendrop.models.gpt import Gpt

_MODULES = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}

# our block's module: GPT-2's, and whether its weight is transposed there
_OF_LAYER = {
    "norm_1": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.out": ("attn.c_proj", True),
    "norm_2": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}


def as_gpt2(model: Gpt, end: int) -> GPT2LMHeadModel:
    """The same function as a GPT-2, sharing the weights that both lay out alike.

    Args:
        end: id of the end of text.
    Raises:
        UserError: the model has rotary positions, which GPT-2 has not.
    """
    config = model.config
    if model.positions is None:
        raise UserError("this model has rotary positions and GPT-2 has none; want model.positions: learned")
    gpt2_config = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.sequence_length,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        n_inner=4 * config.width,
        activation_function="gelu_new",
        layer_norm_epsilon=model.norm.eps,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        bos_token_id=end,
        eos_token_id=end,
        dtype="float32",
    )
    with torch.device("meta"):  # no random weights first: they would cost time and room
        gpt2 = GPT2LMHeadModel(gpt2_config)
    gpt2.load_state_dict(gpt2_weights(model), strict=True, assign=True)
    gpt2.tie_weights()
    return gpt2.eval()


def gpt2_weights(model: Gpt) -> dict[str, Tensor]:
    """A Gpt's weights under GPT-2's names."""
    weights = {"lm_head.weight": model.tokens.weight.detach()}
    for name, parameter in model.named_parameters():
        theirs, transposed = _theirs(name)
        weights[theirs] = parameter.detach().T.contiguous() if transposed else parameter.detach()
    return weights


def weights_of(theirs: Mapping[str, Tensor], config: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """GPT-2's weights under the names of ours."""
    found: dict[str, Tensor] = {}
    for ours in names:
        with suppress(KeyError, ValueError):  # a parameter that they have not
            name, transposed = _theirs(ours)
            found[ours] = theirs[name].T if transposed else theirs[name]
    return found


def sizes_of(config: Any) -> dict[str, Any]:
    """Keys of `model` in a job for a GPT-2.

    Raises:
        ValueError: it has something that ours have not.
    """
    wanted = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * config.n_embd),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }
    check_settings(config, wanted)
    return {
        "kind": "gpt",
        "positions": "learned",
        "layers": config.n_layer,
        "width": config.n_embd,
        "heads": config.n_head,
        "vocab_size": config.vocab_size,
        "sequence_length": config.n_positions,
    }


def check_settings(config: Any, wanted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError where a setting of another model is none of those that ours have."""
    for key, values in wanted.items():
        if getattr(config, key, values[0]) not in values:
            raise ValueError(f"want {key} of {' or '.join(map(str, values))}, found {getattr(config, key)}")


def _theirs(name: str) -> tuple[str, bool]:
    """GPT-2's name of one of our parameters, and whether it is transposed there (Conv1D); KeyError without one."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"transformer.{_MODULES[module]}.{kind}", False
    _, number, ours = module.split(".", 2)
    theirs, transposed = _OF_LAYER[ours]
    return f"transformer.h.{number}.{theirs}.{kind}", transposed and kind == "weight"
