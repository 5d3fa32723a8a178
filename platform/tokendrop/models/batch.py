"""What a model reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro batch; B sequences of S tokens."""

    input_ids_BS: Tensor
    labels_BS: Tensor
    sample_ids_B: Tensor
    """int64: a sample's number in the whole run, which no other sample of the run has."""
    number: int = 0
    """Number of this micro batch within its global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertBatch(Batch):
    """Pairs of sentences, `[CLS] A [SEP] B [SEP]` and padding; a label of -100 is not to be predicted."""

    token_types_BS: Tensor
    """int64: 1 for B and the [SEP] after it, 0 elsewhere."""
    attention_mask_BS: Tensor
    """bool: False for padding."""
    sentence_labels_B: Tensor
    """int64: 1 where A and B do not follow each other."""
