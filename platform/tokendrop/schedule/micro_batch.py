"""How many sequences a worker runs at a time where layers see fewer tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape, Work

TokensAtOnce = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchGrowth:
    """Lets more sequences run at a time the fewer tokens layers see, so that short kept lengths keep a device busy."""

    tokens: TokensAtOnce
    """Tokens that a dropped layer sees at a time, at most; auto: as many sequences as keep no more activations than a
    micro batch at full length does."""
    recomputes: bool = False
    """Whether activations are computed again in the backward pass: then only what goes into each layer is kept."""

    def most_sequences(self, batch: BatchSplit, shape: ModelShape, *, work: Sequence[Work], kept: int) -> int:
        """Sequences that may run at a time, at least a micro batch; no more where layers run on some of them alone, for
        these do not spread evenly.

        Args:
            batch: whose micro batches run at full length.
            work: of all layers in one step.
            kept: tokens of a sequence that reach the head where dropped ones do not.
        """
        sequences = batch.global_batch
        if any(some < sequences for _, some, _ in work):
            return batch.micro_batch
        if self.tokens == "auto":
            full = self._activations(shape, [(shape.layers, 1, shape.sequence_length)], 1, shape.sequence_length)
            most = batch.micro_batch * full * sequences // self._activations(shape, work, sequences, kept)
        else:
            shorter = [tokens for _, _, tokens in work if tokens < shape.sequence_length]
            most = self.tokens // max(shorter, default=shape.sequence_length)
        return max(most, batch.micro_batch)

    def _activations(self, shape: ModelShape, work: Iterable[Work], sequences: int, kept: int) -> int:
        """Numbers that the forward pass keeps for the backward pass.

        A layer keeps 8 times the width and twice the MLP's for each token: 34 bytes of the width in 16 bits, less the
        masks of dropout (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1). Attention keeps no scores. Embedding,
        last norm and head keep 4 times the width: the head's logits go by chunks.
        """
        of_a_layer = 8 * shape.width + 2 * shape.mlp_width
        outside = 4 * shape.width * sequences * (kept if shape.head_drops else shape.sequence_length)
        layer_tokens = sum(layers * some * tokens for layers, some, tokens in work)
        if not self.recomputes:
            return outside + of_a_layer * layer_tokens
        largest = max(some * tokens for layers, some, tokens in work if layers)
        return outside + shape.width * layer_tokens + of_a_layer * largest
