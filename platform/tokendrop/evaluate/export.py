"""A checkpoint as a Hugging Face GPT-2, to be used without us."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tokendrop.config.model import GptConfig
from tokendrop.data.commit import appearing
from tokendrop.data.tokenizer import END_OF_TEXT, end_of_text
from tokendrop.errors import UserError
from tokendrop.evaluate.load import load_run
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


def export_checkpoint(path: Path, to: Path) -> Path:
    """Write the model of a run or a checkpoint as a Hugging Face GPT-2 folder with the same logits.

    Args:
        path: a run folder, for its newest checkpoint, or a checkpoint.
        to: the folder to make; it appears whole or not at all.
    Returns:
        `to`, as an absolute path.
    Raises:
        UserError: there is no checkpoint, the target holds something, or the model is no GPT-2.
    """
    to = to.absolute()
    check_free(to)
    model, tokenizer = load_run(path)
    if model.positions is None:
        raise UserError(f"{path}: this model has rotary positions and GPT-2 has none; want model.positions: learned")
    with appearing(to) as partial:
        as_gpt2(model, end_of_text(tokenizer)).save_pretrained(partial)
        as_fast_tokenizer(tokenizer, model.config).save_pretrained(partial)
        for weights in partial.glob("*.safetensors"):  # its writer keeps everybody else from reading
            weights.chmod((partial / "config.json").stat().st_mode)
    return to


def as_gpt2(model: Gpt, end: int) -> GPT2LMHeadModel:
    """The same function as a GPT-2, sharing the weights that both lay out alike.

    Args:
        end: id of the end of text.
    """
    config = model.config
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


def as_fast_tokenizer(tokenizer: Tokenizer, config: GptConfig) -> PreTrainedTokenizerFast:
    """The run's tokenizer as transformers wants it.

    Without its post-processor, which in some tokenizers puts special tokens around a text: training had none.
    """
    plain = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "post_processor": None}))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        model_max_length=config.sequence_length,
        clean_up_tokenization_spaces=False,
    )


def check_free(to: Path) -> None:
    """Raises UserError where something lies at `to` already; an empty folder is nothing."""
    if to.is_dir() and not any(to.iterdir()):
        return
    if to.exists():
        raise UserError(f"{to}: something is there already; want a new or an empty folder")
