"""From a job's strategy to its engine."""

import torch
import torch.distributed as dist
from torch import nn

from tokendrop.config.train import TrainConfig
from tokendrop.models.shared_tokens import share_tokens
from tokendrop.train.engines.base import Engine
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.engines.deepspeed import DeepSpeedEngine
from tokendrop.train.engines.fsdp import FsdpEngine
from tokendrop.train.engines.mesh import mesh_of_workers
from tokendrop.train.engines.tensor_parallel import TensorParallelEngine
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.task import LossFunction


def apply_strategy(
    model: nn.Module,
    layers: nn.ModuleList,
    loss: LossFunction,
    training: TrainConfig,
    dtype: torch.dtype,
    *,
    timeout_s: float,
) -> Engine:
    """The engine of a job's strategy; one worker alone has nothing to share, and runs the plain model.

    Args:
        timeout_s: a worker that keeps the others of its group waiting longer counts as lost.
    """
    shares = dist.is_initialized() and dist.get_world_size() > 1
    if shares and training.context_parallel > 1:
        sizes = {"replicas": dist.get_world_size() // training.context_parallel, "group": training.context_parallel}
        device = next(model.parameters()).device
        share_tokens(layers, mesh_of_workers(device, sizes, timeout_s=timeout_s)["group"])
    if shares and training.tensor_parallel > 1:
        return TensorParallelEngine(model, layers, training, dtype, loss=loss, timeout_s=timeout_s)
    if shares and training.strategy == "fsdp":
        return FsdpEngine(model, layers, training, dtype, loss=loss)
    optimizers = build_optimizers(model, training)
    if shares and training.strategy == "deepspeed":
        return DeepSpeedEngine(model, layers, optimizers, dtype, loss=loss, stage=training.zero_stage or 1)
    return DdpEngine(model, optimizers, dtype, loss=loss, cuda_graphs=training.cuda_graphs)
