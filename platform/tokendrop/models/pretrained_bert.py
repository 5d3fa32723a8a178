"""Models of the ecosystem with the same function as our BERT: Hugging Face's BERT, and Megatron-LM's there."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForPreTraining,
    PreTrainedModel,
)

from tokendrop.models.bert import Bert

_KINDS = {
    ("post", True): (BertConfig, BertForPreTraining),
    ("post", False): (BertConfig, BertForMaskedLM),
    ("pre", True): (MegatronBertConfig, MegatronBertForPreTraining),
    ("pre", False): (MegatronBertConfig, MegatronBertForMaskedLM),
}

# our module: theirs; norms lie elsewhere in Megatron-LM's
_MODULES = {
    "tokens": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "types": "bert.embeddings.token_type_embeddings",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "pooler": "bert.pooler.dense",
    "sentence": "cls.seq_relationship",
}
_NORM = {"post": "bert.embeddings.LayerNorm", "pre": "bert.encoder.ln"}
_QKV = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))
_OF_LAYER = {
    "attention.qkv": _QKV,
    "attention.out": ("attention.output.dense",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
}
_NORMS_OF_LAYER = {
    "post": {"norm_1": ("attention.output.LayerNorm",), "norm_2": ("output.LayerNorm",)},
    "pre": {"norm_1": ("attention.ln",), "norm_2": ("ln",)},
}


def as_bert(model: Bert, pad: int) -> PreTrainedModel:
    """The same function as a model for pretraining, or without a head for sentences as one for masked tokens alone.

    Args:
        pad: id of the padding.
    """
    config = model.config
    config_class, model_class = _KINDS[config.norm, model.sentence is not None]
    sizes = config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        hidden_act="gelu",
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        max_position_embeddings=config.sequence_length,
        type_vocab_size=2,
        layer_norm_eps=model.norm.eps,
        pad_token_id=pad,
        dtype="float32",
    )
    theirs = model_class(sizes).to(model.bias_V.dtype)
    theirs.load_state_dict(bert_weights(model), strict=False)
    theirs.tie_weights()
    return theirs.eval()


def bert_weights(model: Bert) -> dict[str, Tensor]:
    """A Bert's weights under the names of Hugging Face's."""
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        names = _names(name, model)
        weights |= dict(zip(names, parameter.detach().chunk(len(names)), strict=True))
    return weights


def read_bert(model: Bert, weights: Mapping[str, Tensor]) -> None:
    """Put the weights of Hugging Face's model into ours.

    Raises:
        KeyError: one is missing; it is named.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.cat([weights[one] for one in _names(name, model)]))


def _names(name: str, model: Bert) -> tuple[str, ...]:
    """Theirs of one of our parameters: one, or three whose parts lie in ours one after the other."""
    if name == "bias_V":
        return ("cls.predictions.bias",)
    norm, (module, _, kind) = model.config.norm, name.rpartition(".")
    if module == "norm":
        return (f"{_NORM[norm]}.{kind}",)
    if not module.startswith("blocks."):
        return (f"{_MODULES[module]}.{kind}",)
    _, number, ours = module.split(".", 2)
    theirs = (_OF_LAYER | _NORMS_OF_LAYER[norm])[ours]
    return tuple(f"bert.encoder.layer.{number}.{one}.{kind}" for one in theirs)
