"""Vision transformer: embed patches -> layers -> head on [CLS] -> loss. Parameters have timm's names and layout."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokendrop.config.model import VitConfig
from tokendrop.models.attention import full_attention
from tokendrop.models.layer import Layer

# Dimensions: B micro batch, C channels, X and Y pixels, S tokens (kept ones in a dropped layer), D width, H heads,
# W head width, P values of a patch, K classes.

_EPS = 1e-6


class Attention(nn.Module):
    """Self-attention among the tokens it is given."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, tokens, width = x_BSD.shape
        q_BHSW, k_BHSW, v_BHSW = (
            part_BSD.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part_BSD in self.qkv(x_BSD).split(width, dim=2)
        )
        out_BHSW = full_attention(q_BHSW, k_BHSW, v_BHSW, dropout=self.dropout if self.training else 0.0)
        return self.proj(out_BHSW.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Two matrix products with a GELU between them."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BSD)))


class Block(Layer):
    """One layer: attention, then MLP, each normalized first and added to its input."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(config.width, _EPS), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.width, _EPS), Mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.training and self.recompute:
            return checkpoint(self._compute, x_BSD, use_reentrant=False)
        return self._compute(x_BSD)

    def _compute(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attn(self.norm1(x_BSD)))
        return x_BSD + self.dropout(self.mlp(self.norm2(x_BSD)))


class PatchEmbedding(nn.Module):
    """A token for each patch of an image, row by row."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, config.patch_size, config.patch_size)

    def forward(self, pixels_BCYX: Tensor) -> Tensor:
        # as one matrix product: on a CPU in bf16 a third of a convolution's time
        batch, channels, height, width = pixels_BCYX.shape
        size = self.proj.kernel_size[0]
        grid = pixels_BCYX.view(batch, channels, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)
        patches_BSP = grid.flatten(3).flatten(1, 2)
        return F.linear(patches_BSP, self.proj.weight.flatten(1), self.proj.bias)


class VitLoss(NamedTuple):
    """What a forward pass came to."""

    mean: Tensor
    """Mean cross entropy of the labels, nats."""
    logits_BK: Tensor
    """Detached."""


class Vit(nn.Module):
    """A ViT that classifies images by its [CLS] token."""

    HANDS_ON_ONCE = True

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.empty(1, config.sequence_length, config.width))
        self.patch_embed = PatchEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, _EPS)
        self.head = nn.Linear(config.width, config.classes)
        self._initialize()

    def forward(self, pixels_BCYX: Tensor, labels_B: Tensor) -> VitLoss:
        """The loss of normalized images (B, 3, image_size, image_size)."""
        logits_BK = self.logits(pixels_BCYX)
        return VitLoss(F.cross_entropy(logits_BK, labels_B), logits_BK.detach())

    def logits(self, pixels_BCYX: Tensor) -> Tensor:
        """Logits of the classes, (B, K)."""
        patches_BSD = self.patch_embed(pixels_BCYX.to(self.cls_token.dtype))
        x_BSD = torch.cat((self.cls_token.expand(len(patches_BSD), -1, -1), patches_BSD), dim=1)
        x_BSD = self.dropout(x_BSD + self.pos_embed)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD[:, 0]))

    def _initialize(self) -> None:
        """timm's: normal(0.02), cut off at two units; patches as torch's convolutions; [CLS] and biases about zero."""
        for name, parameter in self.named_parameters():
            if name == "cls_token":
                nn.init.normal_(parameter, std=1e-6)
            elif name.endswith("bias") and not name.startswith("patch_embed"):
                nn.init.zeros_(parameter)
            elif "norm" not in name and not name.startswith("patch_embed"):
                nn.init.trunc_normal_(parameter, std=0.02)
