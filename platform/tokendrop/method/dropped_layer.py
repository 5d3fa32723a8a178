"""A layer that runs on its kept tokens: gather -> layers of the span -> combine."""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokendrop.method.dropper import Dropping
from tokendrop.method.model_call import inputs_by_name, positional_names
from tokendrop.method.side_inputs import without_cache
from tokendrop.method.tokens import combine_tokens, gather_tokens

# Dimensions: B micro batch, S sequence, K kept length, D width.


class DroppedLayer(nn.Module):
    """What `attach` puts in front of a layer's own class.

    It stands at `__call__`, not at `forward`: outside of `Module.compile` and of activation checkpointing, so
    that the choice of tokens is neither compiled nor computed again. Parameter names, attributes and `isinstance`
    stay those of the plain layer.
    """

    plain_class: ClassVar[type[nn.Module]]
    input_names: ClassVar[list[str]]
    _dropping: Dropping
    _layer_number: int
    _compiled_route: Callable[..., Any] | None = None

    def follow(self, dropping: Dropping, layer_number: int) -> None:
        """Keep, from now on, the tokens that `dropping` draws for this layer."""
        self._dropping, self._layer_number = dropping, layer_number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dropping, number = self._dropping, self._layer_number
        drops = self.training or dropping.drops_in_evaluation
        if not (dropping._drops if drops else dropping.learns):
            if self.training:
                dropping.warn_if_never_drawn()
            return super().__call__(*args, **kwargs)
        hidden_BSD, sides = self._inputs(args, kwargs)
        # layers that see every token fill no cache either: one without the dropped layers would look whole
        sides = without_cache(sides, number)
        kept_BK = dropping.kept(number) if drops else dropping.in_evaluation(number)
        if kept_BK is None:
            return super().__call__(hidden_BSD, **sides)
        if not isinstance(kept_BK, Tensor):
            return kept_BK.run(super().__call__, hidden_BSD, sides, dropping.side_inputs)
        hidden_BSD = dropping.enter(number, hidden_BSD, kept_BK)
        sides = dropping.side_inputs_of(self, sides, kept_BK)
        if self._compiled_route is not None and dropping.is_alone(number) and not self._has_hooks:
            return self._compiled_route(hidden_BSD, kept_BK, sides)
        out = super().__call__(dropping.leave(number, hidden_BSD, kept_BK), **sides)
        return with_hidden(out, dropping.rejoin(number, self._hidden_of(out), kept_BK))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; where the layer is alone on its route, gather and combine are in one graph with it.

        A compiler then reads kept tokens where the layer's first operation wants them, and writes the last one's
        result into their places. Not where the layer has hooks, as under FSDP: these would break that graph up.
        """
        super().compile(*args, **kwargs)
        self._compiled_route = torch.compile(self._route, *args, **kwargs)

    @property
    def _has_hooks(self) -> bool:
        return bool(self._forward_pre_hooks or self._forward_hooks)

    def _route(self, hidden_BSD: Tensor, kept_BK: Tensor, sides: dict[str, Any]) -> Any:
        hidden_BKD, rest_BSD = gather_tokens(hidden_BSD, kept_BK)
        out = super().__call__(hidden_BKD, **sides)
        return with_hidden(out, combine_tokens(rest_BSD, self._hidden_of(out), kept_BK))

    def _hidden_of(self, out: Any) -> Tensor:
        """The hidden states that the layer gave, alone or first in a tuple; raises ValueError where it gave none."""
        hidden = out[0] if isinstance(out, tuple) else out
        if not isinstance(hidden, Tensor):
            name = self.plain_class.__name__
            raise ValueError(f"a {name} gave a {type(hidden).__name__}; want hidden states, alone or in a tuple")
        return hidden

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The hidden states, the layer's first input, and every other input by its name."""
        names = self.input_names
        if not names or len(args) > len(names):
            raise ValueError(f"{self.plain_class.__name__}.forward has inputs without names; none of them can be cut")
        named = inputs_by_name(names, args, kwargs)
        return named.pop(names[0]), named

    def __reduce_ex__(self, protocol: Any) -> Any:
        """So that copies and pickles can name the class: it is made when it is needed."""
        state = {name: value for name, value in self.__getstate__().items() if name != "_compiled_route"}
        return _new_layer, (self.plain_class,), state


def with_hidden(out: Any, hidden_BSD: Tensor) -> Any:
    """What a layer gave, with other hidden states."""
    return (hidden_BSD, *out[1:]) if isinstance(out, tuple) else hidden_BSD


@cache
def dropped_class(plain: type[nn.Module]) -> type[DroppedLayer]:
    """The class of a dropped layer whose own class is `plain`."""
    added = {"plain_class": plain, "input_names": positional_names(plain)}
    return type(f"Dropped{plain.__name__}", (DroppedLayer, plain), added)


def _new_layer(plain: type[nn.Module]) -> DroppedLayer:
    made = dropped_class(plain)
    return made.__new__(made)
