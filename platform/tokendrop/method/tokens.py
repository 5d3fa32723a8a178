"""Gather kept tokens out of the hidden states, and combine a layer's outputs with the dropped ones."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Dimensions: B micro batch, S sequence, K kept length, D width.
# Written in pairs because the generic pair (torch.gather, Tensor.scatter) moves the full (B, S, D) more often than
# needed: it zero-fills it, scatters into it and adds it up in the backward pass, and keeps it alive for that. Here
# the dropped tokens travel from gather to combine as `rest`, and the backward pass writes the kept tokens' gradients
# over their rows of `rest`'s gradient: one copy of (B, S, D) each way, and nothing saved but the indices.


def gather_tokens(hidden_BSD: Tensor, kept_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Take the kept tokens of each sequence.

    Args:
        kept_BK: int64 positions, without repeats within a sequence.
    Returns:
        The kept tokens (B, K, D), and `rest` (B, S, D) for `combine_tokens` and nothing else: its gradient counts
        for the dropped tokens alone.
    """
    batch, length, _ = hidden_BSD.shape
    rows = kept_BK + torch.arange(0, batch * length, length, device=kept_BK.device)[:, None]
    return _Gather.apply(hidden_BSD, rows)


def entering(hidden_BSD: Tensor, kept_BK: Tensor) -> Tensor:
    """The same hidden states, whose backward pass raises ValueError where an activation checkpoint around this has
    computed it again on other tokens. Outside of compiled graphs, which have no room for that."""
    return _Entering.apply(hidden_BSD, kept_BK)


def combine_tokens(rest_BSD: Tensor, out_BKD: Tensor, kept_BK: Tensor) -> Tensor:
    """Put a layer's outputs in the places of its kept tokens; dropped tokens keep their input. A new (B, S, D)."""
    batch, length, _ = rest_BSD.shape
    rows = kept_BK + torch.arange(0, batch * length, length, device=kept_BK.device)[:, None]
    return _Combine.apply(rest_BSD, out_BKD.to(rest_BSD.dtype), rows)


def _write_rows(into_BSD: Tensor, rows_BK: Tensor, values_BKD: Tensor) -> Tensor:
    """A copy of `into` with some rows of its flat (B*S, D) form replaced."""
    width = into_BSD.shape[-1]
    flat = into_BSD.reshape(-1, width).index_copy(0, rows_BK.flatten(), values_BKD.reshape(-1, width))
    return flat.view(into_BSD.shape)


def _read_rows(from_BSD: Tensor, rows_BK: Tensor) -> Tensor:
    width = from_BSD.shape[-1]
    return from_BSD.reshape(-1, width).index_select(0, rows_BK.flatten()).view(*rows_BK.shape, width)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BSD: Tensor, rows_BK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows_BK)
        return _read_rows(hidden_BSD, rows_BK), hidden_BSD.view_as(hidden_BSD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kept_BKD: Tensor, grad_rest_BSD: Tensor) -> tuple[Tensor, None]:
        (rows_BK,) = ctx.saved_tensors
        return _write_rows(grad_rest_BSD, rows_BK, grad_kept_BKD), None


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BSD: Tensor, kept_BK: Tensor) -> Tensor:
        # An activation checkpoint around this runs it again and hands on the positions of then. Those of the forward
        # pass stay here, out of its reach, to compare them with.
        ctx.save_for_backward(kept_BK)
        ctx.kept_BK = kept_BK
        return hidden_BSD.view_as(hidden_BSD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor, None]:
        (kept_BK,) = ctx.saved_tensors
        _check_same(ctx.kept_BK, kept_BK)
        return grad_BSD, None


def _check_same(kept_BK: Tensor, again_BK: Tensor) -> None:
    # mostly the same memory, which is told without waiting for the device
    if kept_BK.data_ptr() != again_BK.data_ptr() and not torch.equal(kept_BK, again_BK):
        raise ValueError(
            "an activation checkpoint around a dropped layer computed it again on other tokens, for draw() was called"
            " before backward(); want draw() after backward(), or checkpoints inside of the layers"
        )


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest_BSD: Tensor, out_BKD: Tensor, rows_BK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_BK)
        return _write_rows(rest_BSD, rows_BK, out_BKD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor, Tensor, None]:
        # The kept rows of the first gradient are not zeroed: _Gather's backward writes over just those rows.
        (rows_BK,) = ctx.saved_tensors
        return grad_BSD, _read_rows(grad_BSD, rows_BK), None
