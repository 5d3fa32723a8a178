"""What a layer reads beside its hidden states, restricted to the kept tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Dimensions: B micro batch, S sequence, K kept length.

TokenDims = Mapping[str, tuple[int, ...]]

KNOWN_SIDE_INPUTS: TokenDims = {
    # name in our models and in Hugging Face's: dimensions along which tokens lie; dimension 0 is always the batch
    "attention_mask": (-2, -1),  # (B, heads or 1, S or 1, S), or (B, S)
    "position_ids": (1,),
    "token_type_ids": (1,),
    "position_embeddings": (1,),  # cosines and sines, each (B or 1, S, head width)
    "src_key_padding_mask": (1,),  # torch's: (B, S)
}


_OF_ALL_SEQUENCES = ("rope", "rotary_pos_emb", "freqs_cis")
"""Rotary positions without a batch dimension, as timm's and Meta's models pass them; one or no token may have none."""
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_OF_CACHES = (*_CACHES, "cache_position")


def without_cache(sides: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Side inputs without the cache of keys and values that Hugging Face's models fill unless told not to.

    Raises:
        ValueError: there are keys and values in it: they belong to tokens that came before, all of them.
    """
    for name in _CACHES:
        cache: Any = sides.get(name)
        if cache.get_seq_length(layer) if hasattr(cache, "get_seq_length") else cache:
            raise ValueError(f"{name}: keys and values of earlier tokens are cached; want none while tokens drop")
    instead = {"use_cache": False, **dict.fromkeys(_OF_CACHES)}
    return {name: instead.get(name, side) for name, side in sides.items()}


def prefix_without_rope(layer: nn.Module) -> int | None:
    """How many tokens at the begin, such as [CLS], a timm layer gives no rotary position; None for other layers."""
    if not getattr(layer, "plain_class", type(layer)).__module__.startswith("timm."):
        return None
    return getattr(getattr(layer, "attn", None), "num_prefix_tokens", None)


def rope_of_kept(rope: Tensor, kept_BK: Tensor, sequence_length: int, prefix: int, *, stay: int) -> Tensor:
    """timm's rotary positions, of all sequences at once, for each sequence's kept tokens.

    Args:
        rope: (S - prefix, D), with heads before it or with batch and heads before it.
        stay: tokens at the begin that every sequence keeps.
    Returns:
        (B, heads or 1, K - prefix, D)
    Raises:
        ValueError: tokens without a rotary position may be dropped, so that the places of the others are not known.
    """
    if rope.shape[-2] != sequence_length - prefix:
        raise ValueError(f"side input 'rope' of shape {tuple(rope.shape)}: want {sequence_length - prefix} positions")
    if stay < prefix:
        raise ValueError(
            f"side input 'rope' has no position for the first {prefix} tokens; want draw(..., always=range({prefix}))"
        )
    rope = rope[(None,) * (4 - rope.ndim)]
    return _select(rope, kept_BK[:, prefix:] - prefix, 2)


def restrict(name: str, value: Any, kept_BK: Tensor, sequence_length: int, known: TokenDims) -> Any:
    """A side input as the layer must see it when it runs on the kept tokens.

    Raises:
        ValueError: it spans the sequence, or may do so, and nothing says along which dimensions.
    """
    if name in _OF_ALL_SEQUENCES and value is not None:
        raise ValueError(
            f"side input '{name}' holds positions of all sequences at once, where each keeps tokens of its own;"
            " want a model whose layers get position_embeddings or position_ids"
        )
    if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
        return tuple(restrict(name, item, kept_BK, sequence_length, known) for item in value)
    if not isinstance(value, Tensor):
        if name in known and value is not None:
            raise ValueError(
                f"side input '{name}' is a {type(value).__name__}; only a tensor can follow the kept tokens"
            )
        return value
    if sequence_length not in value.shape and not (known.get(name) and value.ndim > 1):
        return value
    if name not in known:
        raise ValueError(
            f"side input '{name}' of shape {tuple(value.shape)} spans the sequence of {sequence_length} tokens;"
            f" tell attach() where its tokens lie: side_inputs={{'{name}': (dimension, ...)}}"
        )
    if known[name] and (value.ndim < 2 or value.shape[0] not in (1, len(kept_BK))):
        raise ValueError(
            f"side input '{name}' of shape {tuple(value.shape)}: want dimension 0 to be the batch of"
            f" {len(kept_BK)} or 1, for each sequence keeps tokens of its own"
        )
    for dim in sorted({dim % value.ndim for dim in known[name]} - {0}):
        if value.shape[dim] not in (1, sequence_length):
            raise ValueError(
                f"side input '{name}' of shape {tuple(value.shape)}: want {sequence_length} tokens, or 1 for all, in"
                f" dimension {dim}"
            )
        if value.shape[dim] == sequence_length:
            value = _select(value, kept_BK, dim)
    return value


def _select(value: Tensor, kept_BK: Tensor, dim: int) -> Tensor:
    """`value` at each sample's kept positions along `dim`; a batch dimension of 1 becomes B."""
    batch, kept = kept_BK.shape
    value = value.expand(batch, *value.shape[1:])
    index = kept_BK.view(batch, *(kept if d == dim else 1 for d in range(1, value.ndim)))
    shape = [kept if d == dim else size for d, size in enumerate(value.shape)]
    return torch.take_along_dim(value, index.expand(shape), dim)
