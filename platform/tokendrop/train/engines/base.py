"""One model under one strategy: what the loop asks of it, and how the strategies do it where they do the same."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from tokendrop.models.batch import Batch
from tokendrop.train.device import autocast
from tokendrop.train.reader import CheckpointReader, load_into
from tokendrop.train.task import Loss, LossFunction


def no_label(name: str) -> nullcontext[None]:
    """What marks a phase of a step while nothing is traced."""
    return nullcontext()


class Engine:
    """Runs a model over all workers; the loop knows nothing else of strategies.

    Attributes:
        model: the plain model, with its own parameter names.
        cuda_graphs: whether layers run as CUDA graphs; gradients stay where they are then, and are set to 0.
    """

    cuda_graphs = False

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], dtype: torch.dtype, *, loss: LossFunction
    ) -> None:
        self.model, self.optimizers, self.dtype, self.loss = model, list(optimizers), dtype, loss
        self.device = next(model.parameters()).device
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.label: Callable[[str], AbstractContextManager[Any]] = no_label
        """What marks the phases of a step while it is traced."""

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        """Add the gradients of `share` x the batch's mean loss; the last micro batch averages them over the workers.

        Returns:
            The loss, detached.
        """
        return self.backward(self.forward(self.model, batch), share)

    def backward(self, loss: Loss, share: float) -> Loss:
        """Add the gradients of a share of the loss; returns it without what they were made from."""
        with self.label("backward"):
            (loss.mean * share).backward()
        return replace(loss, mean=loss.mean.detach())

    def step(self, *, lr: float, max_grad_norm: float) -> Tensor:
        """Clip, update, forget the gradients; the gradient norm before clipping."""
        with self.label("optimizer"):
            self.set_lr(lr)
            norm = self.clip(max_grad_norm)
            for optimizer in self.optimizers:
                optimizer.step()
            self.zero_grad()
        return norm

    def clip(self, max_grad_norm: float) -> Tensor:
        """Scale all gradients down to a norm of at most that; their norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def forward(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss by the model or a wrapper of it, matrix products in the engine's dtype."""
        with self.label("forward"), autocast(self.device, self.dtype):
            return self.loss(model, batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Loss:
        """The loss with no token dropped, but by a learned router."""
        self.model.eval()
        loss = self.forward(self.model, batch)
        self.model.train()
        return loss

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a scalar over the workers."""
        self.add_up(value)
        return value / self.world_size if self.world_size > 1 else value

    def add_up(self, value: Tensor) -> None:
        """Add a tensor, of one shape on all of them, up over the workers, in place."""
        if self.world_size > 1:
            dist.all_reduce(value)

    def state(self) -> dict[str, Any]:
        """What this worker saves: `model` and `optimizer`, under the plain model's parameter names.

        What the workers save together is the same for every strategy and world size: torch's own state dictionaries,
        tensors alone. The optimizer's settings are the job's.
        """
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optimizer": {"state": optimizer["state"]}}

    def load(self, reader: CheckpointReader) -> None:
        """Go on from a checkpoint of any strategy and world size; before the first step, and on all workers."""
        model, optimizer = get_state_dict(self.model, self.optimizers)
        state: dict[str, Any] = {"model": model, "optimizer": {"state": optimizer["state"]}}
        self.read(state, reader)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict={**optimizer, **state["optimizer"]},
        )

    def read(self, state: dict[str, Any], reader: CheckpointReader) -> None:
        """Read into what `state` gives, in place."""
        load_into(state, reader)
