"""What processes of a group send each other, counted at torch's own collectives."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# by the operation: which argument holds what every rank has in the end or had at first, and how often a ring sends it
_WHOLE = {
    "allreduce_": (0, 2),
    "_allgather_base_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "allgather_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_": (1, 1),
    "reduce_": (0, 1),
    "broadcast_": (0, 1),
}


class CountedTraffic(TorchDispatchMode):
    """Bytes of ring passes, by operation; an all-reduce is two."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name in _WHOLE:
                argument, passes = _WHOLE[name]
                tensors = [one for one in tree_leaves(args[argument]) if isinstance(one, torch.Tensor)]
                self.bytes[name] += passes * sum(one.numel() * one.element_size() for one in tensors)
                self.calls[name] += 1
            elif name not in ("barrier",):
                raise AssertionError(f"{name}: want to know what it sends")
        return func(*args, **(kwargs or {}))
