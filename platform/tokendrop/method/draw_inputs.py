"""What `draw` is given, checked and in one form: numbers may be numpy's, lists may be arrays."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokendrop.method.draw import DrawContext

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


def check_chosen(chosen: Sequence[Any], kept: Sequence[int], draw: DrawContext, *, values: bool) -> None:
    """Check what a selector chose for routes with these kept lengths.

    Args:
        values: whether the positions themselves are looked at, for which the device is waited for: of a selector of
            the user's own.
    Raises:
        ValueError: it is no int64 (B, K), not ascending, outside of the sequence, or without tokens that always stay.
    """
    for positions, some in zip(chosen, kept, strict=True):
        if isinstance(positions, Tensor):
            _check_positions(positions, (len(draw.sample_ids_B), some), draw, values=values)


def _check_positions(chosen_BK: Tensor, shape: tuple[int, int], draw: DrawContext, *, values: bool) -> None:
    if chosen_BK.shape != shape or chosen_BK.dtype != torch.int64:
        got = f"{chosen_BK.dtype} {tuple(chosen_BK.shape)}"
        raise ValueError(f"a selector chose positions of {got}; want torch.int64 {shape}, of the kept length")
    if not values:
        return
    chosen_BK = chosen_BK.cpu()
    is_inside = bool((chosen_BK[:, 0] >= 0).all()) and bool((chosen_BK[:, -1] < draw.sequence_length).all())
    if not is_inside or not bool((chosen_BK.diff(dim=1) > 0).all()):
        raise ValueError(
            f"a selector chose other positions than ascending ones in 0..{draw.sequence_length - 1}, each once"
        )
    always_BS = draw.always_BS
    if always_BS is not None and not bool(always_BS.gather(1, chosen_BK).sum(1).eq(always_BS.sum(1)).all()):
        raise ValueError("a selector left out tokens that always stay; want those of draw.always_BS among the chosen")


def leading(always_BS: Tensor | None) -> int:
    """How many tokens, from the first on, stay in every sequence."""
    return 0 if always_BS is None else int(always_BS.all(0).int().cumprod(0).sum())
