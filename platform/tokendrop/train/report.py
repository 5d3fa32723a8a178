"""What one step says of itself, and who listens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step, as trackers, tables and dashboards see it; counts are totals over all workers."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean training loss of the global batch, nats per token."""
    val_loss: float | None
    """Mean loss on the held-out rows, with no token dropped; None at steps without validation."""
    grad_norm: float
    lr: float
    kept_length: int
    tokens: int
    """Tokens consumed so far."""
    layer_tokens: int
    """Layer tokens consumed so far."""
    flops: float
    """FLOPs spent so far, by the plan's count; a float, for large runs outgrow 64-bit integers."""
    world_size: int
    data_time_s: float
    """Seconds of this step spent waiting for data."""
    step_time_s: float
    """Seconds since the step before, validation left out."""
    val_figures: Mapping[str, float] | None = None
    """What the task measures beside `val_loss`, by name."""


class Recorder(Protocol):
    """Keeps what a worker did; what it holds is safe once committed."""

    def record(self, report: StepReport, sample_ids: Sequence[int]) -> None:
        """Take in a step: its report, the same on every worker, and the samples that this worker trained on."""
        ...

    def commit(self, step: int) -> None:
        """Make the steps before `step` durable; called before a checkpoint of `step` is committed."""
        ...

    def pause(self, step: int, *, checkpoint_s: float) -> None:
        """Training stops at a committed step before the end; that took so many seconds since its last step."""
        ...
