"""How hard each token of the vocabulary has been to predict: what TokenBypass chooses by."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

# Dimensions: B micro batch, S sequence, N labels, V vocabulary.

_UNIT = 2.0**-20  # nats; losses are added up as whole numbers of it, so that no order of additions shows
_MOST = 1000.0  # nats; 2**33 labels of one token in a step still fit into 64 bits


class TokenScores:
    """A running mean of the loss of each token of the vocabulary, the same whatever the world size.

    Within a step losses are summed up as integers; the step's mean of each token is folded into its score once, when
    all workers' sums are together: score = beta x score + (1 - beta) x mean.
    Source: Hou et al. 2022, arXiv:2203.13240, section 3.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        beta: float = 0.995,
        initial: float = 10.0,
        special_tokens: Sequence[int] = (),
        padding_tokens: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            initial: score, nats, of a token that has been no label yet.
            special_tokens: numbers of tokens whose score is infinite, so that they stay before all others.
            padding_tokens: numbers of tokens that leave before all others.
        Raises:
            ValueError: one of these is not in the vocabulary.
        """
        self.beta = beta
        self._scores_V = torch.full((vocab_size,), initial, dtype=torch.float64, device=device)
        self._fixed_V = torch.zeros_like(self._scores_V)
        for tokens, score in ((special_tokens, torch.inf), (padding_tokens, -torch.inf)):
            if not all(0 <= token < vocab_size for token in tokens):
                raise ValueError(f"want numbers of tokens in 0..{vocab_size - 1}, got {list(tokens)}")
            self._fixed_V[list(tokens)] = score
        self._sums_2V = torch.zeros(2, vocab_size, dtype=torch.int64, device=device)
        self._is_open = False

    def of(self, input_ids_BS: Tensor) -> Tensor:
        """The score of each token that the model reads, nats, float64 (B, S): for `draw(scores=...)`."""
        return (self._scores_V + self._fixed_V)[input_ids_BS]

    def add(self, token_ids: Tensor, losses: Tensor) -> None:
        """Take in the losses of a micro batch, without waiting for them.

        Args:
            token_ids: int64, labels of any shape; those below 0 are not predicted and don't count.
            losses: of as many labels, nats.
        """
        ids_N, losses_N = token_ids.flatten(), losses.detach().flatten().double()
        counts_N = (ids_N >= 0).long()
        whole_N = (losses_N.nan_to_num(nan=_MOST).clamp(0.0, _MOST) / _UNIT).round().long()
        self._sums_2V.index_add_(1, ids_N.clamp(min=0), torch.stack([whole_N, torch.ones_like(whole_N)]) * counts_N)
        self._is_open = True

    def end_step(self, all_reduce: Callable[[Tensor], object] | None = None) -> None:
        """Fold what was added into the scores: once a global batch, on every worker.

        Args:
            all_reduce: adds up an int64 tensor over all workers, in place; None for a single worker.
        """
        if all_reduce is not None:
            all_reduce(self._sums_2V)
        sums_V, counts_V = self._sums_2V.double().unbind()
        mean_V = sums_V / counts_V.clamp(min=1) * _UNIT
        new_V = self._scores_V * self.beta + mean_V * (1 - self.beta)
        self._scores_V = torch.where(counts_V > 0, new_V, self._scores_V)
        self._sums_2V.zero_()
        self._is_open = False

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: float64 (V), the same on every worker.

        Raises:
            ValueError: losses were added since the last `end_step`.
        """
        if self._is_open:
            raise ValueError("scores are saved between steps; call end_step() first")
        return {"token_scores": self._scores_V.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the state of a checkpoint.

        Raises:
            ValueError: it is of another vocabulary.
        """
        scores_V = state["token_scores"]
        if scores_V.shape != self._scores_V.shape:
            raise ValueError(f"want scores of {len(self._scores_V)} tokens, got {tuple(scores_V.shape)}")
        self._scores_V = scores_V.to(self._scores_V, copy=True)
        self._sums_2V.zero_()
        self._is_open = False
