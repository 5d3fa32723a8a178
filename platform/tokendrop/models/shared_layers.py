"""Layers whose heads and MLP a group of workers shares out (Shoeybi et al. 2019, arXiv:1909.08053), by torch's DTensor.

Queries, keys and values of some heads and a part of the MLP are on each worker. What goes in and out of a layer is
whole on all of them, so whatever stands between layers does not see that they are shared: dropped tokens, for one.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tokendrop.errors import UserError
from tokendrop.models import bert, gpt

QKV = ".attention.qkv."
"""In the names of the parameters whose rows are in another order in shared layers: see `by_worker`."""


def share_layers(layers: nn.ModuleList, group: DeviceMesh) -> None:
    """Share the layers of a GPT or BERT out, in place; their parameters become DTensors.

    Args:
        layers: with the same weights on all workers.
        group: of the workers, one dimension.
    Raises:
        UserError: these are other layers.
    """
    for layer in layers:
        if not isinstance(layer, gpt.Block | bert.Block):
            raise UserError(
                f"train.tensor_parallel: want the layers of our GPT or BERT to share out, got {type(layer).__name__}"
            )
        layer.attention.heads //= group.size()
        with torch.no_grad():
            for parameter in layer.attention.qkv.parameters():
                parameter.copy_(by_worker(parameter, group.size()))
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(layer, group, plan, src_data_rank=None)


def by_worker(rows: Tensor, workers: int) -> Tensor:
    """Rows for queries, keys and values, as one worker's queries, keys and values after the other's."""
    return rows.unflatten(0, (3, workers, -1)).transpose(0, 1).flatten(0, 2)


def by_kind(rows: Tensor, workers: int) -> Tensor:
    """What `by_worker` was given: all queries, then all keys, then all values."""
    return rows.unflatten(0, (workers, 3, -1)).transpose(0, 1).flatten(0, 2)
