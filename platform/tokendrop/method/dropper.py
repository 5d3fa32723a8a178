"""The drops of one model: what is drawn, and which tokens leave and rejoin at each layer."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tokendrop.method.draw import DrawContext
from tokendrop.method.draw_inputs import check_chosen, checked_ids, integer, leading, lengths_by_route, tokens_that_stay
from tokendrop.method.learned_router import HighestScored, LearnedRouter
from tokendrop.method.model_call import DrawUse, check_inputs, inputs_by_name, positional_names
from tokendrop.method.route import HighestScore, Route, RunsLayer, Uniform
from tokendrop.method.side_inputs import (
    KNOWN_SIDE_INPUTS,
    TokenDims,
    prefix_without_rope,
    restrict,
    rope_of_kept,
    without_cache,
)
from tokendrop.method.tokens import Stream, combine_tokens, entering, gather_tokens
from tokendrop.method.whole_sequences import WholeSequences

# Dimensions: B micro batch, S sequence, K kept length, D width.


class Dropping:
    """The drops of one model: drawn before each forward pass, read by its dropped layers."""

    def __init__(self, routes: Sequence[Route], *, seed: int, side_inputs: TokenDims, in_place: bool = False) -> None:
        """
        Args:
            routes: numbered from 0, with no layer in two of them.
            in_place: as of `attach`.
        """
        self.routes = tuple(sorted(routes, key=lambda route: route.first))
        self.layers = tuple(layer for route in self.routes for layer in range(route.first, route.last + 1))
        self.learns = any(isinstance(route.select, LearnedRouter) for route in routes)
        """Whether a learned router chooses, in evaluation too."""
        self.seed = seed
        self.side_inputs = {**KNOWN_SIDE_INPUTS, **side_inputs}
        self._route_of = {layer: route for route in self.routes for layer in range(route.first, route.last + 1)}
        self._sequence_length = 0
        self._kept: dict[int, Tensor | RunsLayer] = {}
        """By the first layer of each route that drops tokens."""
        self._rest: dict[int, tuple[Tensor, bool]] = {}
        """By the first layer of a route that tokens have left: what they rejoin, and whether gradients were wanted."""
        self._stream = Stream() if in_place else None
        self._leading = 0
        """Tokens at the begin of every sequence that always stay."""
        self._use = DrawUse()
        self.hook: RemovableHandle
        """By which the model calls `before_call`."""
        self._is_drawn = self._has_warned = False
        self.drops_in_evaluation = False
        """Whether layers drop outside of training too: to see what that costs."""
        self._drops = False
        """Whether any layer drops tokens. Not asked of `_kept`: torch.compile does not notice that a dict is empty."""

    def draw(
        self,
        *,
        kept_length: int | Mapping[int, int],
        step: int,
        sample_ids: Tensor | Sequence[int],
        sequence_length: int,
        device: torch.device | str | None = None,
        always: Tensor | Sequence[int] = (),
        scores: Tensor | None = None,
        places: Tensor | Sequence[int] | None = None,
        global_batch: int | None = None,
    ) -> None:
        """Choose the tokens that the next forward pass keeps; at full length the layers run as they are.

        A reentrant checkpoint around dropped layers wants the backward pass before the next draw: they would be
        computed again on other tokens, unnoticed. Others may wait; a non-reentrant one around layers says so.

        Args:
            kept_length: tokens kept, for all routes or by the number of a route's first layer; for routes of
                whole sequences, how many of the global batch's stay.
            sample_ids: int64 (B), what tells the samples of this micro batch apart; on the host, or they are
                waited for.
            device: where the model runs; that of the sample ids when left out.
            always: positions of tokens that stay in every route, such as 0 for [CLS]; or bool (B, S), on the host.
            scores: float (B, S), for routes that choose by the score of each token.
            places: of each sample in the global batch, on the host, and
            global_batch: sequences in it, over all workers; both for routes of whole sequences.
        Numbers may be numpy's, and lists may be arrays.
        Raises:
            ValueError: a kept length is not in 1..sequence_length, or less than the tokens that always stay; or the
                ids, the positions or the routes are none.
        """
        step, length = integer("step", step), integer("sequence_length", sequence_length)
        lengths = lengths_by_route(kept_length, [route.first for route in self.routes])
        ids_B = checked_ids(sample_ids)
        context = DrawContext(
            seed=self.seed,
            step=step,
            sample_ids_B=ids_B,
            sequence_length=length,
            device=torch.device(device) if device is not None else ids_B.device,
            always_BS=tokens_that_stay(always, len(ids_B), length),
            scores_BS=scores,
            places_B=None if places is None else torch.as_tensor(places),
            global_batch=global_batch,
        )
        kept: dict[int, Tensor | RunsLayer] = {}
        for selector, routes in groupby(self.routes, key=lambda route: route.select):
            everything = global_batch if isinstance(selector, WholeSequences) else length
            weighs = isinstance(selector, LearnedRouter)  # at full length too
            shorter = [(r, lengths[r.first]) for r in routes if weighs or lengths[r.first] != everything]
            firsts, kepts = [route.first for route, _ in shorter], [kept for _, kept in shorter]
            drawn = selector.select(context, firsts, kepts) if shorter else []
            check_chosen(drawn, kepts, context, values=not isinstance(selector, Uniform | HighestScore))
            kept |= dict(zip(firsts, drawn, strict=True))
        self._kept, self._rest, self._drops, self._is_drawn = kept, {}, bool(kept), True
        self._sequence_length, self._leading = length, leading(context.always_BS)
        self._use.renew()

    def kept(self, layer: int) -> Tensor | RunsLayer | None:
        """Kept positions of a layer, int64 (B, K) ascending, or who runs it; None where it sees every token."""
        route = self._route_of.get(layer)
        return None if route is None else self._kept.get(route.first)

    def in_evaluation(self, layer: int) -> RunsLayer | None:
        """Who runs a layer outside of training; None where it sees every token, as without a learned router."""
        route = self._route_of.get(layer)
        selector = None if route is None else route.select
        return selector.in_evaluation(layer) if isinstance(selector, LearnedRouter) else None

    def added_loss(self) -> Tensor:
        """What a learned router wants added to the loss of the last forward pass, a scalar; 0 where nothing is.

        Raises:
            ValueError: a reentrant checkpoint around a layer hides its gradients.
        """
        routed = [kept for kept in self._kept.values() if isinstance(kept, HighestScored)]
        if torch.is_grad_enabled() and any(kept.has_lost_gradients for kept in routed):
            raise ValueError(
                "a reentrant checkpoint around a layer would lose its router's gradients; want"
                " checkpoint(..., use_reentrant=False)"
            )
        losses = [kept.loss for kept in routed if kept.loss is not None]
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def warn_if_never_drawn(self) -> None:
        """Once, where the model trains and nothing was ever drawn: it would train at full length, unnoticed."""
        if not self._is_drawn and not self._has_warned:
            self._has_warned = True
            warnings.warn("draw() was never called on this model's Dropping: no token is dropped", stacklevel=4)

    def before_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what the model can't compute on dropped tokens, and warn where a draw is not repeated.

        A model that is compiled as a whole is not looked at: what is kept of its inputs would be part of its graph.
        """
        drops = self._drops if model.training or self.drops_in_evaluation else self.learns
        if torch.compiler.is_compiling() or not drops:
            return
        inputs = inputs_by_name(positional_names(type(model)), args, kwargs)
        check_inputs(model, inputs)
        without_cache(inputs, 0)
        if model.training and torch.is_grad_enabled():  # else nothing is trained on the draw
            self._use.see(model, inputs)

    def is_alone(self, layer: int) -> bool:
        """Whether a layer is the only one of its route."""
        route = self._route_of[layer]
        return route.first == route.last

    def enter(self, layer: int, hidden_BSD: Tensor, kept_BK: Tensor) -> Tensor:
        """A layer's input, which is computed again on these tokens or not at all.

        Raises:
            ValueError: it has another shape than the draw was made for.
        """
        if not isinstance(hidden_BSD, Tensor) or hidden_BSD.ndim != 3:
            got = tuple(hidden_BSD.shape) if isinstance(hidden_BSD, Tensor) else f"a {type(hidden_BSD).__name__}"
            raise ValueError(f"layer {layer} takes {got}; want hidden states (batch, tokens, width) to drop tokens of")
        route, (batch, kept) = self._route_of[layer], kept_BK.shape
        length = self._sequence_length if layer == route.first else kept
        if hidden_BSD.shape[:2] != (batch, length):
            raise ValueError(
                f"kept tokens were drawn for {batch} sequences of {self._sequence_length} tokens, layer {layer} got"
                f" {tuple(hidden_BSD.shape[:2])} and not {(batch, length)}; call draw() before each forward pass"
            )
        is_first = layer == route.first and self._stream is None and not torch.compiler.is_compiling()
        return entering(hidden_BSD, kept_BK) if is_first else hidden_BSD

    def leave(self, layer: int, hidden_BSD: Tensor, kept_BK: Tensor) -> Tensor:
        """The hidden states that a layer runs on, (B, K, D); at the first layer of a route the others leave."""
        route = self._route_of[layer]
        if layer > route.first:
            return hidden_BSD
        kept_BKD, rest_BSD = gather_tokens(hidden_BSD, kept_BK, self._stream_here())
        self._rest[route.first] = rest_BSD, torch.is_grad_enabled()
        return kept_BKD

    def rejoin(self, layer: int, out_BKD: Tensor, kept_BK: Tensor) -> Tensor:
        """What a layer hands on: at the last layer of a route all tokens, (B, S, D), else the kept ones.

        Raises:
            ValueError: a reentrant checkpoint around single layers of a route hides the tokens that had left.
        """
        route = self._route_of[layer]
        if layer < route.last:
            return out_BKD
        # that of a single layer goes at once; a checkpoint around the last layer of a span comes here again
        rest_BSD, had_grad = self._rest.pop(layer) if layer == route.first else self._rest[route.first]
        if torch.is_grad_enabled() and not had_grad:
            raise ValueError(
                f"layers {route.first} to {route.last} share their kept tokens, so a reentrant checkpoint around one of"
                " them would lose gradients; want checkpoint(..., use_reentrant=False)"
            )
        return combine_tokens(rest_BSD, out_BKD, kept_BK, self._stream_here())

    def _stream_here(self) -> Stream | None:
        """None in a compiled graph, where the compiler does away with copies or not."""
        return None if torch.compiler.is_compiling() else self._stream

    def side_inputs_of(self, layer: nn.Module, sides: Mapping[str, Any], kept_BK: Tensor) -> dict[str, Any]:
        """A layer's inputs beside its hidden states, restricted to the kept tokens."""
        length, known = self._sequence_length, self.side_inputs
        cut: dict[str, Any] = {}
        prefix = prefix_without_rope(layer)
        if prefix is not None and sides.get("rope") is not None:
            cut["rope"] = rope_of_kept(sides["rope"], kept_BK, length, prefix, stay=self._leading)
        return {
            name: cut[name] if name in cut else restrict(name, side, kept_BK, length, known)
            for name, side in sides.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to one forward pass: a copy has draws of its own."""
        stream = self._stream and Stream()
        return {**vars(self), "_kept": {}, "_rest": {}, "_stream": stream, "_is_drawn": False, "_drops": False}
