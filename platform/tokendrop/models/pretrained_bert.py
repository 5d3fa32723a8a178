"""Models of the ecosystem with the same function as our BERT: Hugging Face's BERT, and Megatron-LM's there."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForSequenceClassification,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForMultipleChoice,
    MegatronBertForPreTraining,
    MegatronBertForSequenceClassification,
    PreTrainedModel,
)

from tokendrop.models.bert import Bert, BertClassifier, BertEncoder
from tokendrop.models.pretrained import check_settings

Norm = Literal["post", "pre"]

_KINDS = {
    ("post", "pretraining"): (BertConfig, BertForPreTraining),
    ("post", "masked"): (BertConfig, BertForMaskedLM),
    ("post", "labels"): (BertConfig, BertForSequenceClassification),
    ("post", "choices"): (BertConfig, BertForMultipleChoice),
    ("pre", "pretraining"): (MegatronBertConfig, MegatronBertForPreTraining),
    ("pre", "masked"): (MegatronBertConfig, MegatronBertForMaskedLM),
    ("pre", "labels"): (MegatronBertConfig, MegatronBertForSequenceClassification),
    ("pre", "choices"): (MegatronBertConfig, MegatronBertForMultipleChoice),
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
    "classifier": "classifier",
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
    return _exported(model, _KINDS[model.config.norm, "pretraining" if model.sentence is not None else "masked"], pad)


def as_classifier(model: BertClassifier, pad: int, *, labels: Sequence[str], choices: bool) -> PreTrainedModel:
    """The same function as a model for sequence classification, or where there are choices for multiple choice.

    Args:
        pad: id of the padding.
        labels: in their order; none where the label is a number.
    """
    kind = _KINDS[model.config.norm, "choices" if choices else "labels"]
    names = dict(enumerate(labels)) if labels and not choices else {0: "LABEL_0"}
    return _exported(model, kind, pad, id2label=names, label2id={name: number for number, name in names.items()})


def _exported(model: BertEncoder, kind: tuple[Any, Any], pad: int, **more: Any) -> PreTrainedModel:
    config, (config_class, model_class) = model.config, kind
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
        **more,
    )
    theirs = model_class(sizes).to(model.tokens.weight.dtype)
    theirs.load_state_dict(bert_weights(model), strict=False)
    theirs.tie_weights()
    return theirs.eval()


def bert_weights(model: BertEncoder) -> dict[str, Tensor]:
    """A BERT's weights under the names of Hugging Face's."""
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        names = _names(name, model.config.norm)
        weights |= dict(zip(names, parameter.detach().chunk(len(names)), strict=True))
    return weights


def weights_of(theirs: Mapping[str, Tensor], config: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """BERT's weights under the names of ours."""
    norm: Norm = sizes_of(config)["norm"]
    found: dict[str, Tensor] = {}
    for ours in names:
        with suppress(KeyError, ValueError):  # a parameter that they have not
            found[ours] = torch.cat([theirs[name] for name in _names(ours, norm)])
    return found


def sizes_of(config: Any) -> dict[str, Any]:
    """Keys of `model` in a job for a BERT.

    Raises:
        ValueError: it has something that ours have not.
    """
    wanted = {
        "hidden_act": ("gelu",),
        "layer_norm_eps": (1e-12,),
        "intermediate_size": (4 * config.hidden_size,),
        "type_vocab_size": (2,),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    }
    check_settings(config, wanted)
    return {
        "kind": "bert",
        "norm": "post" if config.model_type == "bert" else "pre",
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "sequence_length": config.max_position_embeddings,
    }


def _names(name: str, norm: Norm) -> tuple[str, ...]:
    """Theirs of one of our parameters: one, or three whose parts lie in ours one after the other; KeyError without."""
    if name == "bias_V":
        return ("cls.predictions.bias",)
    module, _, kind = name.rpartition(".")
    if module == "norm":
        return (f"{_NORM[norm]}.{kind}",)
    if not module.startswith("blocks."):
        return (f"{_MODULES[module]}.{kind}",)
    _, number, ours = module.split(".", 2)
    theirs = (_OF_LAYER | _NORMS_OF_LAYER[norm])[ours]
    return tuple(f"bert.encoder.layer.{number}.{one}.{kind}" for one in theirs)
