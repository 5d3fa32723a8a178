"""What a model reads, and where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HeldOut = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Sample ids (N,) and their rows (N, row_length)."""


class Samples(Protocol):
    """Training samples by their places in the global sequence of the run."""

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ids (B,) and their rows (B, row_length)."""
        ...


_ON_HOST = ("sample_ids_B", "special_BS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro batch of B samples; a task's own has the tensors that its model reads."""

    sample_ids_B: Tensor
    """int64, always on the host: a sample's number in the whole run, which no other sample of the run has."""
    numbers: tuple[int, ...] = (0,)
    """Of the micro batches that it holds, within their global batch; equal parts of it, in this order."""
    special_BS: Tensor | None = None
    """bool, always on the host: special tokens, which `drop.keep_special_tokens` keeps in every layer."""

    @classmethod
    def joined(cls, batches: Sequence[Self]) -> Self:
        """Micro batches as one."""
        tensors = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(batches[0])}
        return replace(
            batches[0],
            **{name: torch.cat(parts) for name, parts in tensors.items() if isinstance(parts[0], Tensor)},
            numbers=tuple(number for batch in batches for number in batch.numbers),
        )

    def inputs(self) -> dict[str, Tensor]:
        """What the model reads, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _ON_HOST}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def device(self) -> torch.device:
        """Where the model's inputs are."""
        return next(iter(self.inputs().values())).device

    def labels(self) -> Tensor | None:
        """How many labels it has, a scalar, where that differs between batches of one size; else None."""
        return None

    def weighed(self, labels_per_sample: Tensor) -> Self:
        """The batch as a part of several that have so many labels for each sample.

        Its loss is the sum over its labels divided by that number and by its samples: so the mean of the batches'
        losses, by their samples, is the mean over all labels, however samples are split into batches.
        """
        return self

    def cut(self, tokens: int) -> Self:
        """The first so many tokens of each sequence, with their labels."""
        return replace(self, **{name: value[:, :tokens] for name, value in self.inputs().items() if value.ndim > 1})

    def to(self, device: torch.device) -> Self:
        """With the model's inputs on a device; to a GPU from pinned memory, on the current stream, without waiting."""
        if device.type != "cuda":
            return replace(self, **{name: value.to(device) for name, value in self.inputs().items()})
        pinned = {name: value.pin_memory() for name, value in self.inputs().items()}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in pinned.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch(Batch):
    """Sequences of S tokens, each with a label."""

    input_ids_BS: Tensor
    labels_BS: Tensor

    def in_bags(self, size: int) -> Self:
        """Tokens, each of which has the next one as its label, as bags of so many, which have the next bag as labels.

        The inputs are (B, S / size - 1, size), and the labels: what follows the last bag is not in the sample.
        """
        bags_BNT = self.input_ids_BS.unflatten(1, (-1, size))
        return replace(self, input_ids_BS=bags_BNT[:, :-1], labels_BS=bags_BNT[:, 1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class BertBatch(TextBatch):
    """Pairs of sentences, `[CLS] A [SEP] B [SEP]` and padding; a label of -100 is not to be predicted."""

    token_types_BS: Tensor
    """int64: 1 for B and the [SEP] after it, 0 elsewhere."""
    attention_mask_BS: Tensor
    """bool: False for padding."""
    sentence_labels_B: Tensor
    """int64: 1 where A and B do not follow each other."""
    labels_per_sample: Tensor | None = None
    """A scalar: of all batches that a mean is over; this batch's own when left out."""

    def labels(self) -> Tensor:
        return (self.labels_BS >= 0).sum()

    def weighed(self, labels_per_sample: Tensor) -> Self:
        return replace(self, labels_per_sample=labels_per_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleBatch(Batch):
    """Labelled examples of C sequences each: as those of `BertBatch`, without B [SEP] where there is no B."""

    input_ids_BCS: Tensor
    token_types_BCS: Tensor
    attention_mask_BCS: Tensor
    labels_B: Tensor
    """int64, or where labels are numbers float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch(Batch):
    """Normalized images with their classes."""

    pixels_BCYX: Tensor
    """float32, (B, 3, image_size, image_size)."""
    labels_B: Tensor
