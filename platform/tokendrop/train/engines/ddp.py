"""Distributed data parallel: every worker holds the whole model."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tokendrop.models.batch import Batch
from tokendrop.train.engines.base import Engine
from tokendrop.train.task import Loss, LossFunction


class DdpEngine(Engine):
    """`Engine` by torch's DDP; with one worker, the plain model."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        dtype: torch.dtype,
        *,
        loss: LossFunction,
        cuda_graphs: bool = False,
    ) -> None:
        """
        Args:
            cuda_graphs: whether layers run as such. What they give, gradients too, lies where the next micro batch's
                lies: gradients are added up in memory of their own.
        """
        super().__init__(model, optimizers, dtype, loss=loss)
        self.cuda_graphs = cuda_graphs
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world_size > 1 else None

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        with self.ddp.no_sync() if self.ddp and not last_micro_batch else nullcontext():
            return self.backward(self.forward(self.ddp or self.model, batch), share)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            # DDP's gradients live in its buckets
            optimizer.zero_grad(set_to_none=self.ddp is None and not self.cuda_graphs)

    def forward(self, model: nn.Module, batch: Batch) -> Loss:
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # what they gave for the micro batch before is needed no more
            self._make_gradients()
        return super().forward(model, batch)

    def _make_gradients(self) -> None:
        # not before: torch restores no optimizer state where there are gradients
        for parameter in self.model.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def state(self) -> dict[str, Any]:
        """As any engine's; but all workers hold the same, so each gives its share alone and copies no more."""
        whole = super().state()
        if self.ddp is None:
            return whole
        weights, moments = whole["model"], whole["optimizer"]["state"]
        tensors = {name: [weight, *moments.get(name, {}).values()] for name, weight in weights.items()}
        assert moments.keys() <= tensors.keys(), "the optimizer has state of what the model does not save"
        owners = shared_out(tensors, self.world_size)
        mine = [name for name in tensors if owners[name] == dist.get_rank()]
        return {
            "model": {name: weights[name] for name in mine},
            "optimizer": {"state": {name: moments[name] for name in mine if name in moments}},
        }


def shared_out(tensors: Mapping[str, Sequence[Tensor]], workers: int) -> dict[str, int]:
    """The worker of each name, so that all have about as many bytes: the largest first, to whoever has the least."""
    held, owners = [0] * workers, dict[str, int]()
    sizes = {name: sum(tensor.nbytes for tensor in some) for name, some in tensors.items()}
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        owners[name] = held.index(min(held))
        held[owners[name]] += sizes[name]
    return owners
