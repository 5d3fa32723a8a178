"""Models of the ecosystem with the same function as ours: Hugging Face's GPT-2."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tokendrop.errors import UserError
from tokendrop.models.gpt import Gpt

# our block's module: GPT-2's, and whether its weight is transposed there (Conv1D)
_MODULES = {
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
    assert model.positions is not None
    weights = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.positions.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
        "lm_head.weight": model.tokens.weight,
    }
    for number, block in enumerate(model.blocks):
        for ours, (theirs, transposed) in _MODULES.items():
            module = block.get_submodule(ours)
            for name, parameter in module.named_parameters():
                turned = parameter.T.contiguous() if transposed and name == "weight" else parameter
                weights[f"transformer.h.{number}.{theirs}.{name}"] = turned
    return {name: weight.detach() for name, weight in weights.items()}
