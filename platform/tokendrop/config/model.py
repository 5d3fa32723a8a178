"""What is trained."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tokendrop.schedule.costs import ModelShape

Sizes = dict[str, int]


def _sizes(layers: int, width: int, heads: int, sequence_length: int) -> Sizes:
    return {"layers": layers, "width": width, "heads": heads, "sequence_length": sequence_length}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """What every transformer here has."""

    PRESETS: ClassVar[dict[str, Sizes]]
    causal: ClassVar[bool]
    sizes: ClassVar[tuple[str, ...]]
    """Keys that want a number of at least 1."""

    preset: str | None = None
    """A named size; keys given beside it win."""
    layers: int
    width: int
    heads: int
    dropout: float = 0.0
    init_from: str | None = None
    """A trained model to begin with the weights of: a run, a checkpoint, or a model of others, a file or folder or by
    its name on the hub; random ones without it. Its sizes are those of the job."""

    def __post_init__(self) -> None:
        found = tuple(getattr(self, key) for key in self.sizes)
        if min(found) < 1:
            keys = f"{', '.join(self.sizes[:-1])} and {self.sizes[-1]}"
            raise ValueError(f"want {keys} of at least 1, got {found}")
        if self.layers > 10_000:
            raise ValueError(f"want at most 10,000 layers, got {self.layers}")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"want 0 <= dropout < 1, got {self.dropout}")

    def shape_of(self, *, sequence_length: int, vocab_size: int) -> ModelShape:
        """What the plan counts layer tokens and FLOPs by."""
        return ModelShape(
            layers=self.layers,
            width=self.width,
            sequence_length=sequence_length,
            vocab_size=vocab_size,
            mlp_width=4 * self.width,
            causal=self.causal,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelConfig(TransformerConfig):
    """What models of text have."""

    sizes = ("layers", "width", "heads", "sequence_length", "vocab_size")

    sequence_length: int
    """Tokens of one training sequence; with `init_from`, a shorter one takes the first positions."""
    vocab_size: int
    """Rows of the embedding; at least the tokenizer's size. A multiple of 64 is fastest."""

    @property
    def shape(self) -> ModelShape:
        """What the plan counts layer tokens and FLOPs by."""
        return self.shape_of(sequence_length=self.sequence_length, vocab_size=self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig(LanguageModelConfig):
    """A decoder in the style of GPT-2 and GPT-3."""

    PRESETS = {
        "gpt-1m": _sizes(4, 128, 4, 256),
        "gpt-5m": _sizes(6, 256, 4, 512),
        "gpt-10m": _sizes(8, 320, 5, 512),
        "gpt-30m": _sizes(8, 512, 8, 1024),
        "gpt2-124m": _sizes(12, 768, 12, 1024),
        "gpt2-355m": _sizes(24, 1024, 16, 1024),
        # Brown et al. 2020, table 2.1; the 1.3B model with 16 heads, as Megatron-DeepSpeed trains it
        "gpt3-125m": _sizes(12, 768, 12, 2048),
        "gpt3-350m": _sizes(24, 1024, 16, 2048),
        "gpt3-760m": _sizes(24, 1536, 16, 2048),
        "gpt3-1.3b": _sizes(24, 2048, 16, 2048),
    }
    causal = True

    kind: Literal["gpt"] = "gpt"
    positions: Literal["learned", "rotary"] = "learned"

    def __post_init__(self) -> None:
        super(GptConfig, self).__post_init__()
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            raise ValueError(f"rotary positions want an even head width, got {self.width}/{self.heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(LanguageModelConfig):
    """An encoder in the style of BERT."""

    PRESETS = {
        # Turc et al. 2019, arXiv:1908.08962
        "bert-mini": _sizes(4, 256, 4, 512),
        "bert-small": _sizes(4, 512, 8, 512),
        "bert-medium": _sizes(8, 512, 8, 512),
        "bert-base": _sizes(12, 768, 12, 512),
        "bert-large": _sizes(24, 1024, 16, 512),
    }
    causal = False

    kind: Literal["bert"] = "bert"
    norm: Literal["post", "pre"] = "post"
    """Where a layer normalizes: after it has added to its input, as BERT, or before it reads it, as Megatron-LM."""
    new_head: bool = False
    """With `init_from`, whether a classifier begins with a random head, whatever that of the trained model is."""

    def __post_init__(self) -> None:
        super(BertConfig, self).__post_init__()
        if self.sequence_length < 5:
            raise ValueError(
                f"want a sequence_length of at least 5: three special tokens and two, got {self.sequence_length}"
            )


def _vit_sizes(layers: int, width: int, heads: int) -> Sizes:
    return {"layers": layers, "width": width, "heads": heads, "image_size": 224, "patch_size": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig(TransformerConfig):
    """A vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929): a [CLS] token and one for each patch."""

    PRESETS = {
        "vit-ti16": _vit_sizes(12, 192, 3),
        "vit-s16": _vit_sizes(12, 384, 6),
        "vit-b16": _vit_sizes(12, 768, 12),
        "vit-l16": _vit_sizes(24, 1024, 16),
    }
    causal = False
    sizes = ("layers", "width", "heads", "image_size", "patch_size", "classes")

    kind: Literal["vit"] = "vit"
    image_size: int
    """Height and width of the images that it reads, pixels; others are brought to it."""
    patch_size: int
    """Height and width of a patch, pixels."""
    classes: int
    """What it tells apart."""
    new_head: bool = False
    """With `init_from`, whether to begin with a random head, whatever that of the trained model is."""

    def __post_init__(self) -> None:
        super(VitConfig, self).__post_init__()
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}")

    @property
    def sequence_length(self) -> int:
        """Tokens of an image: [CLS] and its patches."""
        return 1 + (self.image_size // self.patch_size) ** 2

    @property
    def vocab_size(self) -> int:
        """What its head tells apart."""
        return self.classes

    @property
    def shape(self) -> ModelShape:
        """What the plan counts layer tokens and FLOPs by; the embedding of patches, a hundredth, is left out."""
        return self.shape_of(sequence_length=self.sequence_length, vocab_size=self.classes)


ModelConfig = GptConfig | BertConfig | VitConfig

PRESETS = {
    **dict.fromkeys(GptConfig.PRESETS, "gpt"),
    **dict.fromkeys(BertConfig.PRESETS, "bert"),
    **dict.fromkeys(VitConfig.PRESETS, "vit"),
}
"""The kind of model of each named size that can be trained."""
