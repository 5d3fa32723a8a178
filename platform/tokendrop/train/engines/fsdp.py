"""Fully sharded data parallel: every worker holds a share of each parameter, its gradient and its optimizer state."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        shard(model, layers, mesh)  # gives the model new parameters, for the optimizer to find
        super().__init__(model, build_optimizers(model, training), dtype, loss=loss)

    def clip(self, max_grad_norm: float) -> Tensor:
        norm = super().clip(max_grad_norm)
        assert isinstance(norm, DTensor)
        return norm.full_tensor()


def shard(model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Share a model's parameters out over the workers of a mesh, in place; call `attach` before, not after.

    Args:
        mesh: of one dimension; of two where each row of it holds all of the model.
    """
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
