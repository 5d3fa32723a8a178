"""Distributed data parallel: every worker holds the whole model."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokendrop.models.batch import Batch
from tokendrop.train.device import autocast


class DdpEngine:
    """`Engine` by torch's DDP; with one worker, the plain model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self.model, self.optimizer, self.dtype = model, optimizer, dtype
        self.device = next(model.parameters()).device
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world_size > 1 else None

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Tensor:
        replica = self.ddp or self.model
        with self.ddp.no_sync() if self.ddp and not last_micro_batch else nullcontext():
            with autocast(self.device, self.dtype):
                loss = replica(batch.input_ids_BS, batch.labels_BS)
            (loss * share).backward()
        return loss.detach()

    def step(self, *, lr: float, max_grad_norm: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.world_size == 1)  # DDP's gradients live in its buckets
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        self.model.eval()
        with autocast(self.device, self.dtype):
            loss = self.model(batch.input_ids_BS, batch.labels_BS)
        self.model.train()
        return loss

    def mean(self, value: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(value)
            value = value / self.world_size
        return value
