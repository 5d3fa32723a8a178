"""Models of other people, small and with random weights: transformers', timm's and torch's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

LAYERS, BATCH, LENGTH, VOCAB = 4, 3, 12, 40
PIXELS = 24
EXACT = 1e-12  # float64; the order of additions may differ
IN_FLOAT32 = 1e-4
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": LENGTH + 4}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT2 = {"n_layer": LAYERS, "n_embd": 16, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCAB}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ENCODER = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {"img_size": PIXELS, "patch_size": 6, "embed_dim": 16, "depth": LAYERS, "num_heads": 2, "num_classes": 5}
ROPE = {"use_rot_pos_emb": True, "attn_type": "rope", "rope_grid_indexing": "xy", "rope_temperature": 10.0}


@dataclass(frozen=True)
class Other:
    """A class of models, and what its layers compute."""

    build: Callable[[str], nn.Module]
    """With `sdpa` or `eager` attention."""
    causal: bool = False
    window: int = 10**6
    """Tokens that a query sees, itself among them."""
    tokens: int = LENGTH
    prefix: int = 0
    """Tokens at the begin that must stay."""
    mask: str = "attention_mask"
    """What its layers call their mask."""
    in_float32: tuple[str, ...] = ()
    """The attentions with which it computes something in float32 whatever it is in; some then overflow in float64."""

    def model(self, attention: str = "sdpa") -> nn.Module:
        """In float64 where that works, with weights so large that every layer matters; the same at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build(attention).train()
            model = model.float() if attention in self.in_float32 else model.double()
            for name, parameter in model.named_parameters():
                if "norm" not in name.lower() and "ln_" not in name:
                    nn.init.normal_(parameter, std=0.2)
        return model

    def tolerance(self, attention: str) -> float:
        return IN_FLOAT32 if attention in self.in_float32 else EXACT


def layers(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) == LAYERS)


def text(kind: str, head: str, settings: dict[str, Any], **more: Any) -> Other:
    """A language model of transformers."""

    def build(attention: str) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{kind}Config")(**settings)
        config._attn_implementation = attention
        config._experts_implementation = "eager"  # the others know no float64
        return getattr(transformers, kind + head)(config)

    return Other(build, causal=head != "ForMaskedLM", **more)


def image(kind: str, settings: dict[str, Any], *, prefix: int = 1, keeps_prefix: bool = False) -> Other:
    """A vision transformer of timm; one with rotary positions has to keep its first tokens."""

    def build(attention: str) -> nn.Module:
        model = getattr(pytest.importorskip("timm").models, kind)(**IMAGE, **settings)
        for block in model.blocks:
            block.attn.fused_attn = attention == "sdpa"
        return model

    tokens = (PIXELS // IMAGE["patch_size"]) ** 2 + prefix
    return Other(build, tokens=tokens, prefix=prefix if keeps_prefix else 0, mask="attn_mask")


class Encoder(nn.Module):
    """torch's own encoder, over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        return self.encoder(self.tokens(input_ids), src_key_padding_mask=padding) @ self.tokens.weight.T


EAGER = ("eager",)
MODELS = {
    "gpt2": text("GPT2", "LMHeadModel", GPT2),
    "llama": text("Llama", "ForCausalLM", GROUPED, in_float32=EAGER),
    "qwen2": text("Qwen2", "ForCausalLM", GROUPED, in_float32=EAGER),
    "qwen3": text("Qwen3", "ForCausalLM", {**GROUPED, "head_dim": 8}, in_float32=EAGER),
    "mistral": text("Mistral", "ForCausalLM", {**GROUPED, "sliding_window": 5}, window=5, in_float32=EAGER),
    "mixtral": text("Mixtral", "ForCausalLM", {**GROUPED, "num_local_experts": 4}, in_float32=("sdpa", "eager")),
    "bert": text("Bert", "ForMaskedLM", ENCODER),
    "roberta": text("Roberta", "ForMaskedLM", {**ENCODER, "pad_token_id": 0}),
    "torch": Other(lambda _: Encoder(), mask="src_mask"),
    "vit": image("VisionTransformer", {}),
    "vit with cls kept": image("VisionTransformer", {}, keeps_prefix=True),
    "vit without cls": image("VisionTransformer", {"class_token": False, "global_pool": "avg"}, prefix=0),
    "rope vit": image("Eva", {**ROPE, "use_abs_pos_emb": False}, keeps_prefix=True),
    "rope vit mixed": image("Eva", {**ROPE, "use_abs_pos_emb": False, "rope_type": "mixed"}, keeps_prefix=True),
    "eva02": image("Eva", {"swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}, keeps_prefix=True),
}
TEXTS = [name for name, other in MODELS.items() if other.tokens == LENGTH]
HUGGING_FACE = [name for name in TEXTS if name != "torch"]
IMAGES = [name for name in MODELS if name not in TEXTS]


def inputs(name: str, padding: str = "none", *, seed: int = 2) -> dict[str, Tensor]:
    """A batch: images, or token ids whose begin (`left`) or end (`right`) is padding; that is no target."""
    generator = torch.Generator().manual_seed(seed)
    if name in IMAGES:
        return {"x": torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator, dtype=torch.float64)}
    batch = {"input_ids": torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator)}
    if padding != "none":
        mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3], [LENGTH - 6]])).long()
        batch["attention_mask"] = mask if padding == "right" else mask.flip(1)
    return batch


def real_tokens(name: str, batch: dict[str, Tensor]) -> Tensor:
    """bool (B, S): those that are no padding."""
    samples = len(next(iter(batch.values())))
    return batch.get("attention_mask", torch.ones(samples, MODELS[name].tokens)).bool()


def run(name: str, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and the outputs for real tokens or for images."""
    if name in IMAGES:
        logits = model(**batch)
        return logits.square().mean(), logits
    more = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    out = model(**batch, **more)
    logits_BSV = out if isinstance(out, Tensor) else out.logits
    real_BS = real_tokens(name, batch)
    loss = nn.functional.cross_entropy(logits_BSV[real_BS], batch["input_ids"][real_BS])
    return loss, logits_BSV[real_BS]
