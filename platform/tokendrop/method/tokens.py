"""Gather kept tokens out of the hidden states, and combine a layer's outputs with the dropped ones."""

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Dimensions: B micro batch, S sequence, K kept length, D width.
# Written in pairs because the generic pair (torch.gather, Tensor.scatter) moves the full (B, S, D) more often than
# needed: it zero-fills it, scatters into it and adds it up in the backward pass, and keeps it alive for that. Here
# the dropped tokens travel from gather to combine as `rest`, and the backward pass writes the kept tokens' gradients
# over their rows of `rest`'s gradient: one copy of (B, S, D) each way, and nothing saved but the indices. Pairs that
# follow each other do without these copies too, in a `Stream`.


@dataclass(slots=True)
class _Passage:
    """One layer's gather and combine."""

    owns_input: bool = False
    owns_gradient: bool = False
    """Whether the gradient of its output is of its own, which is known once a layer begins with that output."""


class Stream:
    """The hidden states that dropped layers hand on to each other, where nothing else reads them.

    The first layer's combine copies; those after it write into its copy, and in the backward pass alike. Autograd
    raises an error where an operation has saved what was written over.
    """

    def __init__(self) -> None:
        self._passage = _Passage()
        self._rest: ReferenceType[Tensor] | None = None
        self._handed_on: tuple[ReferenceType[Tensor], _Passage] | None = None

    def enter(self, hidden_BSD: Tensor) -> _Passage:
        """A layer begins; it may write over its input if that is what the last one handed on.

        Not without gradients: a reentrant checkpoint runs a layer so, and keeps the input to run it again.
        """
        self._passage = _Passage()
        if torch.is_grad_enabled() and self._handed_on is not None and self._handed_on[0]() is hidden_BSD:
            self._passage.owns_input = self._handed_on[1].owns_gradient = True
        return self._passage

    def expect(self, rest_BSD: Tensor) -> None:
        """What the layer that has begun will combine its outputs with."""
        self._rest = ref(rest_BSD)

    def owns(self, rest_BSD: Tensor) -> bool:
        """Whether a layer may write over what it combines its outputs with."""
        return self._passage.owns_input and self._is_last(rest_BSD)

    def hand_on(self, hidden_BSD: Tensor, rest_BSD: Tensor) -> None:
        """A layer has ended."""
        self._handed_on = (ref(hidden_BSD), self._passage) if self._is_last(rest_BSD) else None

    def _is_last(self, rest_BSD: Tensor) -> bool:
        """Whether it is of the layer that began last, the only one whose passage is at hand."""
        return self._rest is not None and self._rest() is rest_BSD


def gather_tokens(hidden_BSD: Tensor, kept_BK: Tensor, stream: Stream | None = None) -> tuple[Tensor, Tensor]:
    """Take the kept tokens of each sequence.

    Args:
        kept_BK: int64 positions, without repeats within a sequence.
        stream: that of the pairs before and after; it may change the hidden states that they hand on.
    Returns:
        The kept tokens (B, K, D), and `rest` (B, S, D) for `combine_tokens` and nothing else: its gradient counts
        for the dropped tokens alone.
    """
    batch, length, _ = hidden_BSD.shape
    rows = kept_BK + torch.arange(0, batch * length, length, device=kept_BK.device)[:, None]
    kept_BKD, rest_BSD = _Gather.apply(hidden_BSD, rows, None if stream is None else stream.enter(hidden_BSD))
    if stream is not None:
        stream.expect(rest_BSD)
    return kept_BKD, rest_BSD


def entering(hidden_BSD: Tensor, kept_BK: Tensor) -> Tensor:
    """The same hidden states, whose backward pass raises ValueError where an activation checkpoint around this has
    computed it again on other tokens. Outside of compiled graphs, which have no room for that."""
    return _Entering.apply(hidden_BSD, kept_BK)


def combine_tokens(rest_BSD: Tensor, out_BKD: Tensor, kept_BK: Tensor, stream: Stream | None = None) -> Tensor:
    """Put a layer's outputs in the places of its kept tokens; dropped tokens keep their input.

    Args:
        stream: that of `gather_tokens`.
    Returns:
        (B, S, D), a new one but in a stream.
    """
    batch, length, _ = rest_BSD.shape
    rows = kept_BK + torch.arange(0, batch * length, length, device=kept_BK.device)[:, None]
    in_place = stream is not None and stream.owns(rest_BSD)
    combined_BSD = _Combine.apply(rest_BSD, out_BKD.to(rest_BSD.dtype), rows, in_place)
    if stream is not None:
        stream.hand_on(combined_BSD, rest_BSD)
    return combined_BSD


def _write_rows(into_BSD: Tensor, rows_BK: Tensor, values_BKD: Tensor, *, in_place: bool) -> Tensor:
    """Replace some rows of the flat (B*S, D) form of `into`, or of a copy of it."""
    width = into_BSD.shape[-1]
    written_BSD = into_BSD if in_place else into_BSD.clone(memory_format=torch.contiguous_format)
    written_BSD.view(-1, width).index_copy_(0, rows_BK.flatten(), values_BKD.reshape(-1, width))
    return written_BSD


def _read_rows(from_BSD: Tensor, rows_BK: Tensor) -> Tensor:
    width = from_BSD.shape[-1]
    return from_BSD.reshape(-1, width).index_select(0, rows_BK.flatten()).view(*rows_BK.shape, width)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BSD: Tensor, rows_BK: Tensor, passage: _Passage | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows_BK)
        ctx.passage = passage
        if passage is not None:
            ctx.rows_BK = rows_BK  # to compare with, as in _Entering
        kept_BKD = _read_rows(hidden_BSD, rows_BK)
        if passage is None or not passage.owns_input:
            return kept_BKD, hidden_BSD.view_as(hidden_BSD)
        ctx.mark_dirty(hidden_BSD)  # as combine will; a view of it could not be written over
        return kept_BKD, hidden_BSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kept_BKD: Tensor, grad_rest_BSD: Tensor) -> tuple[Tensor, None, None]:
        (rows_BK,) = ctx.saved_tensors
        in_place = ctx.passage is not None and ctx.passage.owns_gradient
        if ctx.passage is not None:
            _check_same(ctx.rows_BK, rows_BK)
        return _write_rows(grad_rest_BSD, rows_BK, grad_kept_BKD, in_place=in_place), None, None


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
    def forward(ctx: Any, rest_BSD: Tensor, out_BKD: Tensor, rows_BK: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(rows_BK)
        if in_place:
            ctx.mark_dirty(rest_BSD)
        return _write_rows(rest_BSD, rows_BK, out_BKD, in_place=in_place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # The kept rows of the first gradient are not zeroed: _Gather's backward writes over just those rows.
        (rows_BK,) = ctx.saved_tensors
        return grad_BSD, _read_rows(grad_BSD, rows_BK), None, None
