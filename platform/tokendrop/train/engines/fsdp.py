"""Fully sharded data parallel: every worker holds a share of each parameter, its gradient and its optimizer state."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tokendrop.config.train import TrainConfig
from tokendrop.train.engines.base import Engine
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.task import LossFunction


class FsdpEngine(Engine):
    """`Engine` by torch's FSDP2, a layer at a time; gradients are averaged and shared out after every micro batch.

    Weights are gathered in their own dtype and autocast as under DDP, so that the numbers are DDP's too.
    """

    def __init__(
        self, model: nn.Module, layers: nn.ModuleList, training: TrainConfig, dtype: torch.dtype, *, loss: LossFunction
    ) -> None:
        shard(model, layers)  # gives the model new parameters, for the optimizer to find
        super().__init__(model, build_optimizers(model, training), dtype, loss=loss)

    def step(self, *, lr: float, max_grad_norm: float) -> Tensor:
        norm = super().step(lr=lr, max_grad_norm=max_grad_norm)
        assert isinstance(norm, DTensor)
        return norm.full_tensor()


def shard(model: nn.Module, layers: nn.ModuleList) -> None:
    """Share a model's parameters out over all workers, in place; call `attach` before, not after."""
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
