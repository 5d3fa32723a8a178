"""Attention by the faster of two ways, chosen by device, dtype and shape alone."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Dimensions: B micro batch, S tokens, H heads, W head width.

# Scores of a layer up to which batched products are taken: 64 MiB in bf16, kept for the backward pass.
_SCORES_AT_ONCE = 2**25


def causal_attention(q_BHSW: Tensor, k_BHSW: Tensor, v_BHSW: Tensor, *, first: int = 0, dropout: float = 0.0) -> Tensor:
    """Softmax attention of each token to itself and those before it, (B, H, S, W).

    The choice must not depend on timing: equal runs on equal machines compute equal numbers.

    Args:
        first: the place of the first query among the keys, where these are more tokens.
    """
    tokens, all_keys = q_BHSW.shape[2], k_BHSW.shape[2]
    keys = first + tokens
    if all_keys != tokens:
        k_BHSW, v_BHSW = k_BHSW[:, :, :keys], v_BHSW[:, :, :keys]
    if takes_products(q_BHSW, dropout, keys=all_keys):
        later = torch.full((tokens, keys), -math.inf, dtype=q_BHSW.dtype, device=q_BHSW.device).triu(1 + first)
        return attention_by_products(q_BHSW, k_BHSW, v_BHSW, later)
    if first:
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, which takes a second

        mask: Any = causal_lower_right(tokens, keys)
        return F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, attn_mask=mask, dropout_p=dropout)
    return F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, is_causal=True, dropout_p=dropout)


def full_attention(q_BHSW: Tensor, k_BHSW: Tensor, v_BHSW: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Softmax attention of each token to all, (B, H, S, W); chosen as `causal_attention`."""
    if takes_products(q_BHSW, dropout, keys=k_BHSW.shape[2]):
        return attention_by_products(q_BHSW, k_BHSW, v_BHSW, q_BHSW.new_zeros(1, 1))
    return F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, dropout_p=dropout)


def masked_attention(
    q_BHSW: Tensor, k_BHSW: Tensor, v_BHSW: Tensor, mask_B11S: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Softmax attention of each token to all that are not padding, (B, H, S, W); chosen as `causal_attention`.

    Args:
        mask_B11S: bool, False for padding. Where it leaves no token of a sequence, each counts as much as any other.
    """
    batch, heads, tokens, _ = q_BHSW.shape
    # not minus infinity, whose softmax is not a number where a layer has kept nothing but padding
    bias = torch.zeros_like(mask_B11S, dtype=q_BHSW.dtype).masked_fill(~mask_B11S, torch.finfo(q_BHSW.dtype).min)
    if takes_products(q_BHSW, dropout, keys=k_BHSW.shape[2]):
        return attention_by_products(q_BHSW, k_BHSW, v_BHSW, bias.expand(-1, heads, -1, -1).flatten(0, 1))
    bias = bias.expand(batch, -1, tokens, -1)
    return F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, attn_mask=bias, dropout_p=dropout)


def takes_products(q_BHSW: Tensor, dropout: float, *, keys: int) -> bool:
    """Whether batched matrix products are faster than torch's kernel; the same on all workers that share tokens out.

    They are in bf16 on a CPU, whose matrix unit that kernel's backward pass hardly uses: with 8 x 4 heads of 64 it
    takes 8.3 ms for 128 tokens and 33.6 for 512, products 1.9 and 19.7. In float32 neither is faster by much.
    """
    batch, heads, tokens, _ = q_BHSW.shape
    is_bf16_on_cpu = q_BHSW.device.type == "cpu" and q_BHSW.dtype == torch.bfloat16
    return is_bf16_on_cpu and not dropout and batch * heads * tokens * keys <= _SCORES_AT_ONCE


def attention_by_products(q_BHSW: Tensor, k_BHSW: Tensor, v_BHSW: Tensor, bias: Tensor) -> Tensor:
    """Attention with all scores at once.

    Args:
        bias: added to the scores: (S, S), (B x H, 1, S) or (1, 1); the keys last where these are more tokens.
    """
    batch, heads, tokens, width = q_BHSW.shape
    q, k, v = (part.flatten(0, 1) for part in (q_BHSW, k_BHSW, v_BHSW))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(width))
    return (scores.softmax(-1) @ v).view(batch, heads, tokens, width)
