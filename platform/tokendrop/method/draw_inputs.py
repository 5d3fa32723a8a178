"""What `draw` is given, checked and in one form: numbers may be numpy's, lists may be arrays."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Dimensions: B micro batch, S sequence.


def integer(name: str, value: Any) -> int:
    """Raises ValueError for what is no integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: want an integer, got {value}") from None


def lengths_by_route(kept_length: Any, routes: Sequence[int]) -> dict[int, int]:
    """The kept length of each route, by the number of its first layer.

    Args:
        kept_length: one number for all, or a mapping with one for each.
        routes: the numbers of their first layers.
    Raises:
        ValueError: it is of other routes, or a list.
    """
    if isinstance(kept_length, Mapping):
        lengths = {integer("kept_length", one): integer("kept_length", kept) for one, kept in kept_length.items()}
        if lengths.keys() != set(routes):
            raise ValueError(f"kept_length: want one for each of the layers {list(routes)}, got {lengths}")
        return lengths
    if isinstance(kept_length, Sequence):
        raise ValueError(f"kept_length: want a number, or a mapping from layers to numbers, got {kept_length}")
    return dict.fromkeys(routes, integer("kept_length", kept_length))


def checked_ids(sample_ids: Any) -> Tensor:
    """Sample ids, integers (B).

    Raises:
        ValueError: they are no integers, or not one for each sample.
    """
    ids_B = torch.as_tensor(sample_ids)
    if ids_B.ndim != 1 or ids_B.is_floating_point() or ids_B.is_complex() or ids_B.dtype == torch.bool:
        raise ValueError(f"sample_ids: want one integer for each sample, got {ids_B.dtype} of {tuple(ids_B.shape)}")
    return ids_B.long()


def tokens_that_stay(always: Any, batch: int, length: int) -> Tensor | None:
    """bool (B, S), on the host; None where no token always stays.

    Args:
        always: positions in every sequence, or bool (B, S).
    Raises:
        ValueError: it is neither, or a position is not in the sequence.
    """
    given = always.cpu() if isinstance(always, Tensor) else _tensor(always)
    if given.dtype == torch.bool and given.shape == (batch, length):
        return given
    if not given.numel() and given.ndim == 1:
        return None
    if given.ndim != 1 or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(
            f"always: want positions, or bool ({batch}, {length}), got {given.dtype} of {tuple(given.shape)}"
        )
    if not (int(given.min()) >= 0 and int(given.max()) < length):
        raise ValueError(f"always: want positions in 0..{length - 1}, got {given.tolist()}")
    always_BS = torch.zeros(batch, length, dtype=torch.bool)
    always_BS[:, given.long()] = True
    return always_BS


def _tensor(numbers: Any) -> Tensor:
    return torch.as_tensor(numbers if hasattr(numbers, "__array__") else list(numbers))


def leading(always_BS: Tensor | None) -> int:
    """How many tokens, from the first on, stay in every sequence."""
    return 0 if always_BS is None else int(always_BS.all(0).int().cumprod(0).sum())
