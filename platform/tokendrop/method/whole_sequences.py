"""Whole sequences that pass a layer by: the layer runs on some rows of a micro batch, from none to all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokendrop.method.draw import DrawContext, copy_to, draw_places
from tokendrop.method.side_inputs import TokenDims
from tokendrop.method.tokens import combine_tokens, entering, gather_tokens

# Dimensions: B micro batch, R rows that stay, S sequence, D width.


@dataclass(frozen=True, slots=True)
class WholeSequences:
    """A layer runs on just so many sequences of each global batch; the others keep their input.

    The sequences are those of the smallest hashes of (seed, step, layer, place in the global batch), so that neither
    the world size nor the split into micro batches changes them.
    """

    rescales: bool = True
    """Whether what the layer adds to a sequence is divided by the share of sequences that it runs on, so that its mean
    is that of the layer when no sequence is dropped."""

    def select(self, draw: DrawContext, layers: Sequence[int], kept: Sequence[int]) -> list["KeptSequences"]:
        """Which rows of this micro batch each layer runs on.

        Args:
            kept: sequences of the global batch that each layer runs on.
        Raises:
            ValueError: the places in the global batch are missing, or a number of sequences is out of range.
        """
        if draw.places_B is None or draw.global_batch is None:
            raise ValueError("draw: routes of whole sequences want places, those of each sample, and global_batch")
        if draw.always_BS is not None:
            raise ValueError("draw: tokens can't always stay where whole sequences are dropped; want no `always`")
        every = draw.global_batch
        runs_LG = draw_places(
            seed=draw.seed, step=draw.step, layers=tuple(layers), kept=tuple(kept), global_batch=every
        )
        rows = [runs_B.nonzero()[:, 0] for runs_B in runs_LG[:, draw.places_B]]
        on_device = copy_to(draw.device, torch.cat(rows)).split([len(rows_R) for rows_R in rows])  # one copy for all
        return [
            KeptSequences(
                rows_R=rows_R,
                batch=len(draw.places_B),
                scale=every / some if self.rescales and some else 1.0,
            )
            for rows_R, some in zip(on_device, kept, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSequences:
    """The rows of a micro batch that a layer runs on."""

    rows_R: Tensor
    """int64, ascending; of none, the layer runs on an empty batch, and every weight has a gradient of zeros."""
    batch: int
    scale: float
    """By which what the layer adds to its input is multiplied."""

    def run(self, layer: Callable[..., Any], hidden_BSD: Tensor, sides: Mapping[str, Any], known: TokenDims) -> Any:
        """The layer's output, in which the other sequences are as in its input.

        Raises:
            ValueError: the hidden states have another batch than the draw was made for, or a side input is unknown.
        """
        if len(hidden_BSD) != self.batch:
            raise ValueError(
                f"sequences were drawn of a micro batch of {self.batch}, a layer got {len(hidden_BSD)};"
                " call draw() before each forward pass"
            )
        sides = {name: self._restricted(name, side, known) for name, side in sides.items()}
        # a sequence is to its micro batch what a token is to its sequence
        every = hidden_BSD.flatten(1)[None]
        every = every if torch.compiler.is_compiling() else entering(every, self.rows_R[None])
        kept, rest = gather_tokens(every, self.rows_R[None])
        hidden_RSD = kept.view(-1, *hidden_BSD.shape[1:])
        out = layer(hidden_RSD, **sides)
        out_RSD = out[0] if isinstance(out, tuple) else out
        if self.scale != 1:
            out_RSD = hidden_RSD + (out_RSD - hidden_RSD) * self.scale
        combined = combine_tokens(rest, out_RSD.flatten(1)[None], self.rows_R[None]).view(hidden_BSD.shape)
        return (combined, *out[1:]) if isinstance(out, tuple) else combined

    def _restricted(self, name: str, value: Any, known: TokenDims) -> Any:
        """A side input of the rows that stay."""
        if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
            return tuple(self._restricted(name, item, known) for item in value)
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != self.batch or self.batch == 1:
            return value  # of a batch of 1 it goes with any number of rows
        if name not in known:
            raise ValueError(
                f"side input '{name}' of shape {tuple(value.shape)} may be one of each of the {self.batch} sequences;"
                f" tell attach() where its tokens lie: side_inputs={{'{name}': (dimension, ...)}}"
            )
        return value.index_select(0, self.rows_R)
