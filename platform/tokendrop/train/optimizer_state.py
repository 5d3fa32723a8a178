"""Torch's optimizers with their moments in bf16 between steps."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Muon, Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_AT_ONCE = 2**25  # parameters whose moments are exact at a time: 256 MiB of AdamW's


class Bf16State(Optimizer):
    """Mixed into an optimizer: its step is torch's own, some parameters at a time, whose moments are cast for it.

    Rounded to the nearest. On a GPU torch's fused AdamW takes moments in bf16 itself, as torchtitan uses it; on a CPU
    it does not, and this is the same arithmetic on both.
    """

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        groups = self.param_groups
        try:
            for group in groups:
                for parameters in _parts(group["params"]):
                    self.param_groups = [{**group, "params": parameters}]
                    self._cast(parameters, None)
                    super().step()
                    self._cast(parameters, torch.bfloat16)
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # casts to the dtype of the parameters
        for group in self.param_groups:
            self._cast(group["params"], torch.bfloat16)

    def _cast(self, parameters: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        """Moments to a dtype, or to that of their parameter."""
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for key in _MOMENTS:
                if state.get(key) is not None:
                    state[key] = state[key].to(dtype or parameter.dtype)


class Bf16AdamW(Bf16State, AdamW):
    """AdamW with both moments in bf16."""


class Bf16Sgd(Bf16State, SGD):
    """SGD with its momentum in bf16."""


class Bf16Muon(Bf16State, Muon):
    """Muon with its momentum in bf16."""


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in order, as many at a time as have so many elements, at least one."""
    part: list[Tensor] = []
    for parameter in parameters:
        if part and sum(one.numel() for one in part) + parameter.numel() > _AT_ONCE:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part
