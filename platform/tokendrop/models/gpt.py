"""GPT, in the style of GPT-2 and GPT-3: embed -> layers -> head -> loss."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokendrop.config.model import GptConfig
from tokendrop.models.attention import causal_attention
from tokendrop.models.layer import Layer, TokenGroup
from tokendrop.models.loss import head_loss

# Dimensions: B micro batch, S tokens (kept ones in a dropped layer), D width, H heads, W head width, V vocabulary.

Rotary = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention over the tokens it is given, in their order."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(
        self,
        x_BSD: Tensor,
        rotary: Rotary | None,
        bias_B1SS: Tensor | None = None,
        group: TokenGroup | None = None,
    ) -> Tensor:
        batch, tokens, _ = x_BSD.shape
        q_BHSW, k_BHSW, v_BHSW = (
            part.view(batch, tokens, self.heads, self.head_width).transpose(1, 2)
            for part in self.qkv(x_BSD).chunk(3, dim=2)
        )
        if rotary is not None:
            q_BHSW, k_BHSW = rotate(q_BHSW, rotary), rotate(k_BHSW, rotary)
        dropout = self.dropout if self.training else 0.0
        if group is not None:
            k_BHSW, v_BHSW = group.whole(k_BHSW, dim=2), group.whole(v_BHSW, dim=2)
            first = group.rank * tokens
            out_BHSW = causal_attention(q_BHSW, k_BHSW, v_BHSW, first=first, dropout=dropout)
        elif bias_B1SS is None:
            out_BHSW = causal_attention(q_BHSW, k_BHSW, v_BHSW, dropout=dropout)
        else:
            out_BHSW = F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, attn_mask=bias_B1SS, dropout_p=dropout)
        return self.out(out_BHSW.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two matrix products with a GELU between them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSD), approximate="tanh"))


class Block(Layer):
    """One layer: attention, then MLP, each normalized first and added to its input."""

    shares_tokens = True

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm_2, self.mlp = nn.LayerNorm(config.width), Mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BSD: Tensor, position_embeddings: Rotary | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        group = self.token_group
        if group is None:
            return self._run(x_BSD, position_embeddings, attention_mask)
        assert attention_mask is None, "branches of texts are read by one worker"
        rotary = position_embeddings and (group.own(position_embeddings[0]), group.own(position_embeddings[1]))
        return group.whole(self._run(group.own(x_BSD), rotary, None), dim=1)[:, : x_BSD.shape[1]]

    def _run(self, x_BSD: Tensor, rotary: Rotary | None, bias_B1SS: Tensor | None) -> Tensor:
        if self.training and self.recompute:
            return checkpoint(self._compute, x_BSD, rotary, bias_B1SS, use_reentrant=False)
        return self._compute(x_BSD, rotary, bias_B1SS)

    def _compute(self, x_BSD: Tensor, rotary: Rotary | None, bias_B1SS: Tensor | None) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.norm_1(x_BSD), rotary, bias_B1SS, self.token_group))
        return x_BSD + self.dropout(self.mlp(self.norm_2(x_BSD)))


class Gpt(nn.Module):
    """A GPT whose head is tied to its token embedding."""

    HANDS_ON_ONCE = True

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.sequence_length, config.width) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialize()

    @property
    def sequence_length(self) -> int:
        """Tokens that it takes at most."""
        return self.config.sequence_length

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    def forward(self, input_ids_BS: Tensor, labels_BS: Tensor, *, token_losses: bool = False) -> Any:
        """Mean cross entropy of the labels, nats per token; with `token_losses` also that of each, (B, S), detached.

        Bags of tokens, (B, S, T), are read as the means of their embeddings; each token of a label's bag counts 1/T.
        """
        mean, losses_BS, _ = head_loss(self.hidden(input_ids_BS), self.tokens.weight, labels_BS)
        return (mean, losses_BS) if token_losses else mean

    def logits(self, input_ids_BS: Tensor) -> Tensor:
        """Logits of the next token, (B, S, V)."""
        return self.head(self.hidden(input_ids_BS))

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits of the next token after some hidden states, (N, V)."""
        return hidden_ND @ self.tokens.weight.T

    def hidden(self, input_ids_BS: Tensor) -> Tensor:
        """Normalized hidden states of the last layer, (B, S, D), of tokens or of bags of them.

        Raises:
            ValueError: the sequence is longer than the model's.
        """
        tokens = input_ids_BS.shape[1]
        if tokens > self.config.sequence_length:
            raise ValueError(f"want at most {self.config.sequence_length} tokens, got {tokens}")
        x_BSD, rotary = self.tokens(input_ids_BS), None
        if input_ids_BS.ndim == 3:  # bags
            x_BSD = x_BSD.mean(2)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions.weight[:tokens]
        else:
            rotary = rotary_angles(tokens, self.config.width // self.config.heads, x_BSD)
        return self._layers(x_BSD, rotary)

    def hidden_branches(self, input_ids_BS: Tensor, positions_BS: Tensor, sees_BSS: Tensor) -> Tensor:
        """As `hidden`, of rows in which several texts go on from one beginning; a row may be longer than the model's.

        Args:
            positions_BS: of each token in its own text.
            sees_BSS: the tokens that each one attends to, at least one.
        """
        x_BSD, rotary = self.tokens(input_ids_BS), None
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(positions_BS)
        else:
            angles = rotary_angles(self.config.sequence_length, self.config.width // self.config.heads, x_BSD)
            rotary = angles[0][0, positions_BS], angles[1][0, positions_BS]
        bias_BSS = torch.zeros_like(sees_BSS, dtype=x_BSD.dtype).masked_fill(~sees_BSS, -math.inf)
        return self._layers(x_BSD, rotary, attention_mask=bias_BSS[:, None])

    def _layers(self, x_BSD: Tensor, rotary: Rotary | None, **sides: Tensor) -> Tensor:
        x_BSD = self.dropout(x_BSD)
        for block in self.blocks:
            x_BSD = block(x_BSD, rotary, **sides)
        return self.norm(x_BSD)

    def _initialize(self) -> None:
        """GPT-2's: normal(0.02), and the projections into the residual stream smaller by sqrt(2 x layers)."""
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual if into_residual else 0.02)


def rotary_angles(tokens: int, head_width: int, like: Tensor) -> Rotary:
    """Cosines and sines of the rotary positions 0..tokens-1, each (1, S, W) (Su et al. 2021)."""
    exponents = torch.arange(0, head_width, 2, device=like.device, dtype=torch.float64) / head_width
    positions_S = torch.arange(tokens, device=like.device, dtype=torch.float64)
    angles = (positions_S[:, None] * 10_000.0**-exponents).repeat(1, 2)[None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x_BHSW: Tensor, rotary: Rotary) -> Tensor:
    """Turn each token's head vectors by the angles of its position."""
    cos_BSW, sin_BSW = rotary
    first, second = x_BHSW.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHSW * cos_BSW[:, None] + turned * sin_BSW[:, None]).to(x_BHSW.dtype)
