"""Which tokens each layer keeps: a pure function of (seed, step, sample id, layer)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Dimensions: L dropped layers, B micro batch, G global batch, S sequence, K kept length.

# splitmix64 (Steele et al. 2014), written in int64: its odd constants as signed numbers.
_GOLDEN = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
_OF_PLACES = 0x5EC0E5CE5  # keeps the hashes of places apart from those of samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawContext:
    """One micro batch of one step, as selectors see it."""

    seed: int
    step: int
    sample_ids_B: Tensor
    """int64; on the host, or they are waited for."""
    sequence_length: int
    device: torch.device = torch.device("cpu")
    """Where the positions are wanted."""
    always_BS: Tensor | None = None
    """bool, on the host: tokens that stay whatever is drawn, such as [CLS]."""
    scores_BS: Tensor | None = None
    """float: for selectors that choose by a score of each token."""
    places_B: Tensor | None = None
    """int64, on the host: the place of each sample in the global batch, for selectors of whole sequences."""
    global_batch: int | None = None
    """Sequences of a step, over all workers."""


def draw_positions(draw: DrawContext, layers: Sequence[int], kept_lengths: Sequence[int]) -> list[Tensor]:
    """Draw uniformly, for each layer and sample, the positions that the layer keeps.

    Every position gets a 64-bit hash of (seed, step, sample id, layer, position); the smallest hashes are kept.
    Nothing else enters, so rank, world size, accumulation and device do not change a draw.

    Args:
        layers: numbers of the layers that drop tokens.
        kept_lengths: tokens that each of them keeps, 1..sequence_length; those that always stay are among them.
    Returns:
        For each layer the kept positions, int64 (B, K), ascending along K.
    Raises:
        ValueError: a kept length lies outside its range, or is less than the tokens that always stay.
    Source: Yao et al. 2022, arXiv:2211.11586, section 3.1.
    """
    check_lengths(kept_lengths, draw.sequence_length, draw.always_BS)
    if not layers:
        return []
    hash_LBS = position_hashes(draw, layers)
    if draw.always_BS is not None:
        first_S = torch.iinfo(torch.int64).min + torch.arange(draw.sequence_length, device=draw.device)
        hash_LBS = torch.where(copy_to(draw.device, draw.always_BS), first_S, hash_LBS)
    return [
        (hash_BS.topk(kept, dim=-1, largest=False, sorted=False).values & _low_bits(draw.sequence_length))
        .sort(dim=-1)
        .values
        for hash_BS, kept in zip(hash_LBS, kept_lengths, strict=True)
    ]


def position_hashes(draw: DrawContext, layers: Sequence[int]) -> Tensor:
    """A hash of (seed, step, sample id, layer, position), int64 (L, B, S); no two of a sequence are equal."""
    layers_L = torch.tensor(layers, dtype=torch.int64)
    key = _mix(_mix(torch.tensor(draw.seed, dtype=torch.int64)) + draw.step)
    key_LB = copy_to(draw.device, _mix(_mix(key + draw.sample_ids_B.cpu())[None, :] + layers_L[:, None]))
    positions_S = torch.arange(draw.sequence_length, dtype=torch.int64, device=draw.device)
    hash_LBS = _mix(key_LB[:, :, None] + (positions_S + 1) * _GOLDEN)
    # The position replaces the low bits, so no two hashes are equal and every device keeps the same ones.
    return (hash_LBS & ~_low_bits(draw.sequence_length)) | positions_S


def _low_bits(sequence_length: int) -> int:
    return (1 << max(1, (sequence_length - 1).bit_length())) - 1


@lru_cache(maxsize=2)  # all micro batches of a step ask for the same
def draw_places(*, seed: int, step: int, layers: tuple[int, ...], kept: tuple[int, ...], global_batch: int) -> Tensor:
    """Draw uniformly, for each layer, the sequences of a global batch that it runs on: bool (L, G), on the host.

    Every place in the global batch gets a 64-bit hash of (seed, step, layer, place); the smallest hashes are kept.

    Args:
        kept: sequences that each layer runs on, 0..global_batch.
    Raises:
        ValueError: a number of sequences lies outside its range.
    """
    if not all(0 <= some <= global_batch for some in kept):
        raise ValueError(f"want 0..{global_batch} sequences that stay, got {list(kept)}")
    key = _mix(_mix(_mix(torch.tensor(seed, dtype=torch.int64)) + step) + _OF_PLACES)
    key_L = _mix(key + torch.tensor(layers, dtype=torch.int64))
    places_G = torch.arange(global_batch, dtype=torch.int64)
    hash_LG = _mix(key_L[:, None] + (places_G + 1) * _GOLDEN)
    rank_LG = hash_LG.argsort(dim=1, stable=True).argsort(dim=1)
    return rank_LG < torch.tensor(kept)[:, None]


def check_lengths(kept_lengths: Sequence[int], sequence_length: int, always_BS: Tensor | None) -> None:
    """Raises ValueError where a kept length is not in 1..sequence_length, or more tokens always stay than are kept."""
    if not all(0 < kept <= sequence_length for kept in kept_lengths):
        raise ValueError(f"want kept lengths in 1..{sequence_length}, got {list(kept_lengths)}")
    if always_BS is not None and (most := int(always_BS.sum(1).max())) > min(kept_lengths):
        raise ValueError(f"want kept lengths of at least {most}, the tokens that always stay; got {list(kept_lengths)}")


def copy_to(device: torch.device, host: Tensor) -> Tensor:
    """A tensor of any shape, to a GPU from pinned memory: the host does not wait for what the GPU computes."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64: a bijection of 64-bit integers in which every input bit moves every output bit."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
