"""How many sequences a worker runs at a time where layers see fewer tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokendrop.schedule.activations import KEPT, Activations
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape, Work

TokensAtOnce = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchGrowth:
    """Lets more sequences run at a time the fewer tokens layers see, so that short kept lengths keep a device busy."""

    tokens: TokensAtOnce | None = None
    """Tokens that a dropped layer sees at a time, at most; auto: as many sequences as keep no more activations than a
    micro batch at full length does; None: no growth."""
    activations: Activations = KEPT
    """What micro batches keep. Where that has a limit, growth stays within it and has no layer computed again: where
    even a micro batch needs that, none grows."""

    def most_sequences(self, batch: BatchSplit, shape: ModelShape, *, work: Sequence[Work], kept: int) -> int:
        """Sequences that may run at a time, at least a micro batch; no more where layers run on some of them alone, for
        these do not spread evenly.

        Args:
            batch: whose micro batches run at full length, counted in sequences.
            work: of all layers in one step.
            kept: tokens of a sequence that reach the head where dropped ones do not.
        """
        keeps, size, full = self.activations, batch.micro_batch, shape.sequence_length
        again = keeps.recomputes(shape, work, sequences=size, kept=kept)
        is_even = all(some == batch.global_batch for _, some, _ in work)
        if self.tokens is None or not is_even or (again and keeps.limit is not None):
            return size
        each = [(layers, 1, tokens) for layers, _, tokens in work]
        of_one = keeps.growing_bytes(shape, each, sequences=1, kept=kept, again=again)
        if self.tokens == "auto":
            whole = keeps.growing_bytes(shape, [(shape.layers, 1, full)], sequences=1, kept=full, again=again)
            most = size * whole // of_one
        else:
            most = self.tokens // max((tokens for _, _, tokens in work if tokens < full), default=full)
        if keeps.limit is not None:
            most = min(most, (keeps.limit - keeps.fixed_bytes(shape, again=again)) // of_one)
        return max(most, size)


NO_GROWTH = MicroBatchGrowth()
"""Every segment runs in the job's micro batches, and keeps what they compute."""
