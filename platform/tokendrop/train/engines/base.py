"""What the strategies have in common; with one worker, all of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tokendrop.models.batch import Batch
from tokendrop.train.checkpoint import load_into
from tokendrop.train.device import autocast
from tokendrop.train.reader import CheckpointReader


class TorchEngine:
    """`Engine` of a model that torch's own optimizer updates."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self.model, self.optimizer, self.dtype = model, optimizer, dtype
        self.device = next(model.parameters()).device
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Tensor:
        loss = self.forward(self.model, batch)
        (loss * share).backward()
        return loss.detach()

    def step(self, *, lr: float, max_grad_norm: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        self.optimizer.step()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss by the model or a wrapper of it, matrix products in the engine's dtype."""
        with autocast(self.device, self.dtype):
            return model(batch.input_ids_BS, batch.labels_BS)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        self.model.eval()
        loss = self.forward(self.model, batch)
        self.model.train()
        return loss

    def mean(self, value: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(value)
            value = value / self.world_size
        return value

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
