"""What a micro batch's forward pass keeps for its backward pass, and where layers are computed again instead."""

from collections.abc import Iterable
from dataclasses import dataclass

from tokendrop.schedule.costs import ModelShape, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes that autograd keeps, and where layers are computed again in the backward pass to keep fewer."""

    recomputed: bool = False
    """Everywhere."""
    limit: int | None = None
    """Bytes that a micro batch may keep on a worker: layers are computed again where it would keep more. None for no
    limit."""
    exact_bytes: int = 4
    """Of a number between layers: autocast leaves them in the dtype of the weights."""
    product_bytes: int = 4
    """Of a number that matrix products read."""
    tensor_parallel: int = 1
    """Workers that share out a layer's heads and MLP."""
    context_parallel: int = 1
    """Workers that share out a layer's tokens; each keeps the keys and values of all."""
    has_dropout: bool = False
    """Whose masks take a byte each, as on GPUs; a CPU keeps more for it."""

    def recomputes(self, shape: ModelShape, work: Iterable[Work], *, sequences: int, kept: int) -> bool:
        """Whether layers are computed again where micro batches are these; arguments as of `kept_bytes`."""
        if self.recomputed or self.limit is None:
            return self.recomputed
        return self.kept_bytes(shape, work, sequences=sequences, kept=kept, again=False) > self.limit

    def limited_bytes(self, shape: ModelShape, work: Iterable[Work], *, sequences: int, kept: int) -> int | None:
        """Bytes that such a micro batch keeps, with layers computed again or not; None where there is no limit."""
        if self.limit is None:
            return None
        whole, again = (
            self.kept_bytes(shape, work, sequences=sequences, kept=kept, again=again) for again in (False, True)
        )
        return whole if whole <= self.limit else again

    def kept_bytes(self, shape: ModelShape, work: Iterable[Work], *, sequences: int, kept: int, again: bool) -> int:
        """Bytes that a micro batch keeps; where layers are computed again, with those of the largest one at that time.

        Args:
            work: of all layers in one step.
            sequences: of the micro batch. Where layers run on some of a step's sequences, the worst micro batch counts.
            kept: tokens of a sequence that reach the head where dropped ones do not.
            again: whether layers are computed again.
        """
        of_batch = [(layers, min(some, sequences), tokens) for layers, some, tokens in work]
        return self.fixed_bytes(shape, again=again) + self.growing_bytes(
            shape, of_batch, sequences=sequences, kept=kept, again=again
        )

    def growing_bytes(self, shape: ModelShape, work: Iterable[Work], *, sequences: int, kept: int, again: bool) -> int:
        """Those that grow with the micro batch, whose `work` this is.

        A layer keeps 8 times the width and twice the MLP's for each token: 34 bytes of the width in 16 bits, less the
        masks of dropout (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1). Two of the eight are what its norms
        read, which autocast leaves as exact as the weights; two more are what its matrices read, on every worker that
        shares them. Attention keeps no scores, as on GPUs; in bf16 a CPU does. Embedding, last norm and head keep 4
        times the width: the head's logits go by chunks.
        """
        work = list(work)
        exact = shape.width * self.exact_bytes
        shared = -(-(4 * shape.width + 2 * shape.mlp_width) // self.tensor_parallel)
        of_a_layer = 2 * exact + (2 * shape.width + shared) * self.product_bytes
        of_a_layer += 2 * shape.width if self.has_dropout else 0
        if self.context_parallel > 1:
            keys = 2 * shape.width * self.product_bytes
            of_a_layer = keys + -(-(of_a_layer - keys) // self.context_parallel)
        outside = 4 * exact * sequences * (kept if shape.head_drops else shape.sequence_length)
        layer_tokens = sum(layers * some * tokens for layers, some, tokens in work)
        if not again:
            return outside + of_a_layer * layer_tokens
        largest = max(some * tokens for layers, some, tokens in work if layers)
        return outside + exact * layer_tokens // self.context_parallel + of_a_layer * largest

    def fixed_bytes(self, shape: ModelShape, *, again: bool) -> int:
        """Those of a micro batch of any size: the head's gradient, which its forward pass computes, and autocast's
        copies of the layers' weights, where layers are computed again of one at a time."""
        head = shape.vocab_size * shape.width * self.exact_bytes
        if self.product_bytes == self.exact_bytes:
            return head
        layers = shape.layer_parameters // self.tensor_parallel
        return head + layers * self.product_bytes // (shape.layers if again else 1)


KEPT = Activations()
"""No layer is computed again."""
