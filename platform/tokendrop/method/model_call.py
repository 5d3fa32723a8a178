"""What a model that drops tokens is called with: refused where it can't go with drops, remembered where it can."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED = 256
"""Elements of a tensor by which it is told from others: enough for token ids and pixels, and cheap."""
_PRIME = 2654435761  # Knuth's: multiples of it modulo a size lie apart, and not all in one column of a batch


class DrawUse:
    """What the current draw was first used for: its inputs, and the weights of that time.

    A draw is for one micro batch of one optimizer step. Its use for the same inputs and weights again is right:
    for a gradient that is added up twice, or a checkpoint around the whole model. Samples of the tensors stand for
    them, so that no batch is kept in memory.
    """

    def __init__(self) -> None:
        self._has_warned = False
        self._inputs: list[Tensor] | None = None
        self._weights: list[Tensor] = []

    def renew(self) -> None:
        """There is a new draw."""
        self._inputs, self._weights = None, []

    def see(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Remember the first training pass on a draw; warn, once, where a later one is of something else."""
        if self._has_warned:
            return
        found = [_sample(value) for value in inputs.values() if type(value) is Tensor]
        weights = [_sample(weight) for weight in _one_weight(model)]
        if self._inputs is None:
            self._inputs, self._weights = found, weights
            return
        changed = [
            name
            for name, before, now in (("inputs", self._inputs, found), ("weights", self._weights, weights))
            if not _equal(before, now)
        ]
        if changed:
            self._has_warned = True
            warnings.warn(
                f"the {' and '.join(changed)} are others than when draw() was last called, so the same positions are"
                " dropped again; call draw() before each training forward pass",
                stacklevel=6,
            )


def check_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError for what a model can't compute while its layers drop tokens."""
    if inputs.get("use_cache"):
        raise ValueError(
            "use_cache=True: keys and values of dropped tokens would be missing; want use_cache=False while tokens drop"
        )
    _check_flash(model, inputs)
    returns_router_logits = inputs.get("output_router_logits")
    if returns_router_logits is None:
        returns_router_logits = getattr(getattr(model, "config", None), "output_router_logits", False)
    if returns_router_logits and inputs.get("attention_mask") is not None:
        raise ValueError(
            "output_router_logits with an attention_mask: dropped layers route their kept tokens alone, which a mask of"
            " all tokens does not fit; want output_router_logits=False, or no attention_mask where nothing is padded"
        )


def _check_flash(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError for what FlashAttention goes by the order of tokens in, where SDPA and eager go by masks."""
    if any(name.startswith("cu_seq_lens") and value is not None for name, value in inputs.items()):
        raise ValueError("cu_seq_lens: bounds of packed documents don't follow the kept tokens; want an attention_mask")
    config = getattr(model, "config", None)
    if "flash" not in str(getattr(config, "_attn_implementation", "")):
        return
    if getattr(config, "sliding_window", None):
        raise ValueError("FlashAttention counts a sliding window in kept tokens; want attn_implementation='sdpa'")
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and bool((positions.diff(dim=-1) < 0).any()):
        raise ValueError(
            "FlashAttention finds packed documents by position_ids that begin again, which may be dropped; want"
            " attn_implementation='sdpa'"
        )


def inputs_by_name(names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a module by the names that its forward gives them; those beyond get numbers."""
    numbered = {names[place] if place < len(names) else str(place): value for place, value in enumerate(args)}
    return numbered | dict(kwargs)


@lru_cache(maxsize=64)
def positional_names(kind: type[nn.Module]) -> list[str]:
    """Of the inputs of a module's forward that may be passed by position."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _one_weight(model: nn.Module) -> Iterator[Tensor]:
    """A weight that every optimizer step changes, such as a bias or the scale of a norm; none where all are frozen."""
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    first = next(trained, None)
    weight = first if first is None or first.ndim == 1 else next((one for one in trained if one.ndim == 1), first)
    if weight is not None:
        shard: Any = weight
        yield shard.to_local() if hasattr(shard, "to_local") else shard


def _sample(value: Tensor) -> Tensor:
    return value.detach().take(_places(value.numel(), value.device))


@lru_cache(maxsize=64)
def _places(size: int, device: torch.device) -> Tensor:
    if size <= _SAMPLED:
        return torch.arange(size, device=device)
    return torch.arange(_SAMPLED, device=device) * _PRIME % size


def _equal(before: list[Tensor], now: list[Tensor]) -> bool:
    return len(before) == len(now) and all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
