"""What a model reads."""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro batch; B sequences of S tokens."""

    input_ids_BS: Tensor
    labels_BS: Tensor
    sample_ids_B: Tensor
    """int64, always on the host: a sample's number in the whole run, which no other sample of the run has."""
    number: int = 0
    """Number of this micro batch within its global batch."""

    def inputs(self) -> dict[str, Tensor]:
        """What the model reads, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sample_ids_B"}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

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
class BertBatch(Batch):
    """Pairs of sentences, `[CLS] A [SEP] B [SEP]` and padding; a label of -100 is not to be predicted."""

    token_types_BS: Tensor
    """int64: 1 for B and the [SEP] after it, 0 elsewhere."""
    attention_mask_BS: Tensor
    """bool: False for padding."""
    sentence_labels_B: Tensor
    """int64: 1 where A and B do not follow each other."""
