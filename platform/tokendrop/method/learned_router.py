"""A learned router: a layer runs on the tokens that score highest, and what it adds to them is weighed by the score."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendrop.method.draw import DrawContext, check_lengths
from tokendrop.method.side_inputs import TokenDims, restrict
from tokendrop.method.tokens import combine_tokens, gather_tokens

# Dimensions: B micro batch, S sequence, K tokens that a layer runs on, D width.

_STD = 0.02  # of the first weights, as of GPT-2's


class LearnedRouter(nn.Module):
    """Mixture of depths (Raposo et al. 2024, arXiv:2404.02258): a linear map of each layer's input scores its tokens.

    `attach` makes it a part of the model, named `router`: its parameters are trained and saved with the others.
    The layers must be causal by the order of their tokens.
    """

    def __init__(self, *, width: int, layers: Sequence[int], seed: int, loss_weight: float) -> None:
        """
        Args:
            width: of the hidden states.
            layers: numbers, from 0, of those that are routed.
            seed: of the first weights.
            loss_weight: of the binary cross entropy between a token's score and whether it was among the highest.
        """
        super().__init__()
        self.loss_weight = loss_weight
        self.scores = nn.ModuleDict({f"{layer}": nn.Linear(width, 1) for layer in layers})
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for score in self.scores.values():
                assert isinstance(score, nn.Linear)
                score.weight.copy_(torch.randn(1, width, generator=generator, device="cpu") * _STD)
                score.bias.zero_()

    def select(self, draw: DrawContext, layers: Sequence[int], kept: Sequence[int]) -> list["HighestScored"]:
        """How many tokens each layer runs on; which, is known when it gets its hidden states.

        Raises:
            ValueError: a kept length is out of range, or tokens are to stay always.
        """
        check_lengths(kept, draw.sequence_length, None)
        if draw.always_BS is not None:
            raise ValueError("draw: tokens can't always stay where a router chooses; want no `always`")
        return [HighestScored(router=self, layer=layer, kept=some) for layer, some in zip(layers, kept, strict=True)]

    def in_evaluation(self, layer: int) -> "ScoredAboveZero":
        """Who goes through a layer outside of training."""
        return ScoredAboveZero(router=self, layer=layer)

    def logits(self, layer: int, hidden_BSD: Tensor) -> Tensor:
        """Scores of the tokens before a layer, (B, S): logits of being among the highest, not in autocast's dtype."""
        score = self.scores[f"{layer}"]
        with torch.autocast(hidden_BSD.device.type, enabled=False):
            return score(hidden_BSD.to(next(score.parameters()).dtype))[..., 0]


@dataclass(slots=True, kw_only=True)
class HighestScored:
    """In training a layer runs on so many tokens of each sequence, those of the highest scores."""

    router: LearnedRouter
    layer: int
    kept: int
    loss: Tensor | None = None
    """What the router adds to the loss, a scalar; of the last pass through the layer."""

    @property
    def has_lost_gradients(self) -> bool:
        """Whether the router would be trained, and `loss` was computed where nothing is."""
        weight = next(self.router.scores[f"{self.layer}"].parameters())
        return self.loss is not None and weight.requires_grad and not self.loss.requires_grad

    def run(self, layer: Callable[..., Any], hidden_BSD: Tensor, sides: Mapping[str, Any], known: TokenDims) -> Any:
        """The layer's output, in which the other tokens are as in its input; of equal scores the first ones count.

        Raises:
            ValueError: the sequences have fewer tokens, or a side input is unknown.
        """
        if hidden_BSD.shape[1] < self.kept:
            raise ValueError(
                f"want at least {self.kept} tokens, as drawn, layer {self.layer} got {hidden_BSD.shape[1]}"
            )
        logits_BS = self.router.logits(self.layer, hidden_BSD)
        order_BS = logits_BS.detach().argsort(dim=1, descending=True, stable=True)
        kept_BK = order_BS[:, : self.kept].sort(dim=1).values
        is_kept_BS = torch.zeros_like(logits_BS).scatter(1, kept_BK, 1.0)
        self.loss = self.router.loss_weight * F.binary_cross_entropy_with_logits(logits_BS, is_kept_BS)
        sides = {name: restrict(name, side, kept_BK, hidden_BSD.shape[1], known) for name, side in sides.items()}
        return _run(layer, hidden_BSD, sides, kept_BK, logits_BS.sigmoid().gather(1, kept_BK))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAboveZero:
    """In evaluation a layer runs on the tokens that score above 0, which no other token has a say in."""

    router: LearnedRouter
    layer: int

    def run(self, layer: Callable[..., Any], hidden_BSD: Tensor, sides: Mapping[str, Any], known: TokenDims) -> Any:
        """The layer's output, in which the other tokens are as in its input.

        Sequences have different numbers of such tokens. They come first; others follow up to the largest number, as
        padding: what is causal does not look at them, and what comes of them is left out.

        Raises:
            ValueError: a side input is unknown.
        """
        logits_BS = self.router.logits(self.layer, hidden_BSD)
        runs_BS = logits_BS > 0
        most = max(1, int(runs_BS.sum(1).max()))
        kept_BK = (~runs_BS).byte().argsort(dim=1, stable=True)[:, :most]
        runs_BK = runs_BS.gather(1, kept_BK)
        sides = {name: restrict(name, side, kept_BK, hidden_BSD.shape[1], known) for name, side in sides.items()}
        if isinstance(mask := sides.get("attention_mask"), Tensor):
            sides["attention_mask"] = _without_padding(mask, runs_BK)
        weight_BK = torch.where(runs_BK, logits_BS.sigmoid().gather(1, kept_BK), 0.0)
        return _run(layer, hidden_BSD, sides, kept_BK, weight_BK)


def _run(
    layer: Callable[..., Any], hidden_BSD: Tensor, sides: Mapping[str, Any], kept_BK: Tensor, weight_BK: Tensor
) -> Any:
    """Add what a layer adds to some tokens, times their weights."""
    hidden_BKD, rest_BSD = gather_tokens(hidden_BSD, kept_BK)
    out = layer(hidden_BKD, **sides)
    out_BKD = out[0] if isinstance(out, tuple) else out
    out_BKD = hidden_BKD + (out_BKD - hidden_BKD) * weight_BK[..., None].to(hidden_BKD.dtype)
    combined = combine_tokens(rest_BSD, out_BKD, kept_BK)
    return (combined, *out[1:]) if isinstance(out, tuple) else combined


def _without_padding(mask: Tensor, runs_BK: Tensor) -> Tensor:
    """A mask, bool or of numbers to add, in which padding is seen by itself alone, lest a softmax be of nothing."""
    if mask.ndim == 2:  # (B, K): which keys are seen by all
        return mask & runs_BK if mask.dtype == torch.bool else mask * runs_BK
    itself_KK = torch.eye(runs_BK.shape[1], dtype=torch.bool, device=mask.device)
    seen_B1KK = (runs_BK[:, None, :] | itself_KK)[:, None]
    return mask & seen_B1KK if mask.dtype == torch.bool else mask.masked_fill(~seen_B1KK, -torch.inf)
