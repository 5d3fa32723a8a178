"""A step's figures on their way from the device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokendrop.train.report import StepReport


class HostCopy:
    """Scalars that a device has yet to compute; the host does not wait for them."""

    def __init__(self, *values: Tensor) -> None:
        # a GPU's values go to pinned memory
        self._values = [value.detach().to("cpu", non_blocking=True) for value in values]
        on_gpu = [value.device for value in values if value.is_cuda]
        self._copied = torch.cuda.current_stream(on_gpu[0]).record_event() if on_gpu else None

    def read(self) -> list[float]:
        """The values, once the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return [value.item() for value in self._values]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedStep:
    """An optimizer step that the device was given."""

    report: StepReport
    """Its report without the figures."""
    sample_ids: list[int]
    """Of this worker."""
    figures: HostCopy
    """Mean loss, whether any worker was asked to pause (0 for no), gradient norm."""

    def read(self) -> tuple[StepReport, bool]:
        """Wait for the step: its report, and whether any worker was asked to pause; the same on all of them."""
        loss, pauses, grad_norm = self.figures.read()
        return replace(self.report, loss=loss, grad_norm=grad_norm), pauses > 0
