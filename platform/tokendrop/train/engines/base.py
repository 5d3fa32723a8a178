"""What the strategies have in common; with one worker, all of it."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tokendrop.models.batch import Batch
from tokendrop.train.checkpoint import load_into
from tokendrop.train.device import autocast
from tokendrop.train.reader import CheckpointReader
from tokendrop.train.task import Loss, LossFunction


class TorchEngine:
    """`Engine` of a model that torch's own optimizer updates."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, *, loss: LossFunction
    ) -> None:
        self.model, self.optimizer, self.dtype, self.loss = model, optimizer, dtype, loss
        self.device = next(model.parameters()).device
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        return self.backward(self.forward(self.model, batch), share)

    def backward(self, loss: Loss, share: float) -> Loss:
        """Add the gradients of a share of the loss; returns it without what they were made from."""
        (loss.mean * share).backward()
        return replace(loss, mean=loss.mean.detach())

    def step(self, *, lr: float, max_grad_norm: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        self.optimizer.step()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def forward(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss by the model or a wrapper of it, matrix products in the engine's dtype."""
        with autocast(self.device, self.dtype):
            return self.loss(model, batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        self.model.eval()
        loss = self.forward(self.model, batch)
        self.model.train()
        return loss.mean

    def mean(self, value: Tensor) -> Tensor:
        self.add_up(value)
        return value / self.world_size if self.world_size > 1 else value

    def add_up(self, value: Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(value)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": {"state": optimizer["state"]}}

    def load(self, reader: CheckpointReader) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": {"state": optimizer["state"]}}
        load_into(state, reader)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict={**optimizer, **state["optimizer"]},
        )
