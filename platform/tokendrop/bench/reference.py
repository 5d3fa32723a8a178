"""Plain models for comparison: a GPT-2 as one writes it without this project, Hugging Face's BERT, timm's ViT."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendrop.config.model import LanguageModelConfig, ModelConfig


class Plain(NamedTuple):
    """A model that others have written, and how it is trained."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    """Of the model and one of our batches."""


def plain_model(config: ModelConfig, ours: nn.Module) -> Plain | None:
    """The plain model of our model's sizes; None where its library is not installed."""
    if config.kind == "vit":
        if find_spec("timm") is None:
            return None
        from tokendrop.models.pretrained_vit import as_timm

        return Plain("timm_vit", as_timm(ours).train(), _loss_of_vit)  # pyright: ignore[reportArgumentType]
    if config.causal:
        return Plain("plain_gpt2", PlainGpt(config), lambda model, batch: model(batch.input_ids_BS, batch.labels_BS))
    if find_spec("transformers") is None:
        return None
    from tokendrop.models.pretrained_bert import as_bert

    return Plain("hugging_face_bert", as_bert(ours, pad=0).train(), _loss_of_bert)  # pyright: ignore[reportArgumentType]


def _loss_of_vit(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.pixels_BCYX), batch.labels_B)


def _loss_of_bert(model: nn.Module, batch: Any) -> Tensor:
    return model(
        input_ids=batch.input_ids_BS,
        token_type_ids=batch.token_types_BS,
        attention_mask=batch.attention_mask_BS,
        labels=batch.labels_BS,
        next_sentence_label=batch.sentence_labels_B,
    ).loss


class PlainBlock(nn.Module):
    """One layer of GPT-2: attention, then MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = [
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).contiguous().view(batch, tokens, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class PlainGpt(nn.Module):
    """Token and position embeddings, blocks, a tied head, all logits at once."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.sequence_length, config.width)
        self.h = nn.ModuleList(PlainBlock(config.width, config.heads) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))
