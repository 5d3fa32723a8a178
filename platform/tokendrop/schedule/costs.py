"""What one sequence costs: layer tokens, as the paper counts, and matrix-multiplication FLOPs."""

from collections.abc import Iterable
from dataclasses import dataclass

Work = tuple[int, int, int]
"""So many layers, sequences that each of them runs on, and tokens of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide what a transformer costs."""

    layers: int
    width: int
    sequence_length: int
    vocab_size: int
    mlp_width: int
    causal: bool
    head_drops: bool = False
    """Whether dropped tokens do not come back before the head: the sequences themselves are cut."""
    head_tokens: int | None = None
    """Tokens of a sequence that the head reads; None for all that reach it."""

    @property
    def parameters(self) -> int:
        """Weights of the matrices and embeddings, the head tied; norms and biases, a thousandth, are left out."""
        return self.layer_parameters + (self.vocab_size + self.sequence_length) * self.width

    @property
    def layer_parameters(self) -> int:
        """Those of the layers alone."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.mlp_width)

    def flops(self, *, kept: int, dropped_layers: int) -> int:
        """Matrix-multiplication FLOPs to train on one sequence: forward, and twice that backward.

        Counts what is computed: causal attention over half of the pairs, the head over every token that reaches it.

        Raises:
            ValueError: kept or dropped_layers lies outside its range.
        """
        if not 0 < kept <= self.sequence_length:
            raise ValueError(f"want a kept length in 1..{self.sequence_length}, got {kept}")
        if not 0 <= dropped_layers <= self.layers:
            raise ValueError(f"want 0..{self.layers} dropped layers, got {dropped_layers}")
        work = [(self.layers - dropped_layers, 1, self.sequence_length), (dropped_layers, 1, kept)]
        return self.flops_of(work, sequences=1, kept=kept)

    def flops_of(self, work: Iterable[Work], *, sequences: int, kept: int) -> int:
        """The same of any work of the layers, and of a head on so many sequences with so many kept tokens."""
        layers = sum(layers * some * self._layer_flops(tokens) for layers, some, tokens in work)
        reaching = kept if self.head_drops else self.sequence_length
        head_tokens = reaching if self.head_tokens is None else min(reaching, self.head_tokens)
        return 3 * (layers + sequences * 2 * head_tokens * self.width * self.vocab_size)

    def scoring_flops(self, routers: int) -> int:
        """FLOPs to train on one sequence that so many linear maps to one number, for every token, add."""
        return 3 * routers * 2 * self.sequence_length * self.width

    def _layer_flops(self, tokens: int) -> int:
        weights = 4 * self.width**2 + 2 * self.width * self.mlp_width
        pairs = tokens * (tokens + 1) // 2 if self.causal else tokens**2
        return 2 * tokens * weights + 4 * pairs * self.width
