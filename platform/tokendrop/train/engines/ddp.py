"""Distributed data parallel: every worker holds the whole model."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tokendrop.models.batch import Batch
from tokendrop.train.engines.base import Engine
from tokendrop.train.task import Loss, LossFunction


class DdpEngine(Engine):
    """`Engine` by torch's DDP; with one worker, the plain model."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], dtype: torch.dtype, *, loss: LossFunction
    ) -> None:
        super().__init__(model, optimizers, dtype, loss=loss)
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world_size > 1 else None

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        with self.ddp.no_sync() if self.ddp and not last_micro_batch else nullcontext():
            return self.backward(self.forward(self.ddp or self.model, batch), share)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.ddp is None)  # DDP's gradients live in its buckets
