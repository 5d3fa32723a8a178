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
