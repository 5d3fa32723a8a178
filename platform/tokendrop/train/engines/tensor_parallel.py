"""Tensor parallel: groups of workers share layers out, and their replicas share by DDP or FSDP what each worker has."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tokendrop.config.train import TrainConfig
from tokendrop.models.batch import Batch
from tokendrop.models.shared_layers import QKV, by_kind, by_worker, share_layers
from tokendrop.train.engines.base import Engine
from tokendrop.train.engines.fsdp import shard
from tokendrop.train.engines.mesh import mesh_of_workers
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.reader import CheckpointReader
from tokendrop.train.task import Loss, LossFunction

_GROUP = "group"


class TensorParallelEngine(Engine):
    """`Engine` by torch's `parallelize_module` within a group, and by FSDP2 over the replicas.

    Under `ddp` FSDP2 has shards of one worker each, whose gradients it averages after the last micro batch. Embeddings,
    norms and the head are whole on all workers of a group, which compute the same there but for rounding: of these
    gradients they take the mean, and so what they hold stays the same.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        training: TrainConfig,
        dtype: torch.dtype,
        *,
        loss: LossFunction,
        timeout_s: float,
    ) -> None:
        # a matrix that both a group and FSDP share out is gathered in two turns, of which torch warns in every run
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.group = training.tensor_parallel
        self.world = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        self.members = shard_groups(model, layers, training, timeout_s=timeout_s)
        super().__init__(model, build_optimizers(model, training), dtype, loss=loss)
        self.sums_at_end = training.strategy == "ddp"

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        assert isinstance(self.model, FSDPModule)
        # of a share of nothing, as a warm-up has it, nothing may be held back until the last micro batch
        self.model.set_requires_gradient_sync(last_micro_batch or not self.sums_at_end or share == 0)
        return super().forward_backward(batch, share=share, last_micro_batch=last_micro_batch)

    def clip(self, max_grad_norm: float) -> Tensor:
        """As any engine's; each worker adds up what it holds, what others hold too by its share of it."""
        self._agree()
        held = defaultdict[int, list[Tensor]](list)
        meshes = defaultdict[DeviceMesh, list[nn.Parameter]](list)
        for parameter in self.model.parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            held[_holders(gradient)].append(gradient.to_local())
            meshes[gradient.device_mesh].append(parameter)
        squares = torch.stack([nn.utils.get_total_norm(some) ** 2 / holders for holders, some in held.items()]).sum()
        self.add_up(squares)
        norm = squares.sqrt()
        for parameters in meshes.values():  # torch takes those of one mesh at a time
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        return norm

    def _agree(self) -> None:
        """Take the mean over the group of gradients of what each of its workers has whole.

        A GPU adds up in an order that changes, so they differ in rounding, and the workers would drift apart.
        """
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and not _is_shared_out(gradient):
                own = gradient.to_local()
                dist.all_reduce(own, group=self.members)
                own.div_(self.group)

    def state(self) -> dict[str, Any]:
        return _with_qkv(super().state(), self._in_plain_order)

    def read(self, state: dict[str, Any], reader: CheckpointReader) -> None:
        plain = _with_qkv(state, self._in_plain_order)
        super().read(plain, reader)
        for own, read in zip(_qkv(state), _qkv(plain), strict=True):
            own.to_local().copy_(self._in_group_order(read, own))

    def _in_plain_order(self, rows: DTensor) -> DTensor:
        """What checkpoints hold, and each worker a share of."""
        whole = by_kind(rows.full_tensor(), self.group)
        return distribute_tensor(whole, self.world, [Shard(0)], src_data_rank=None)

    def _in_group_order(self, plain: DTensor, like: DTensor) -> Tensor:
        """What this worker holds of rows in plain order."""
        mesh = like.device_mesh
        whole = DTensor.from_local(by_worker(plain.full_tensor(), self.group), mesh, [Replicate()] * mesh.ndim)
        return whole.redistribute(placements=like.placements).to_local()


def shard_groups(
    model: nn.Module, layers: nn.ModuleList, training: TrainConfig, *, timeout_s: float
) -> dist.ProcessGroup:
    """Share layers out within groups of neighbours, and all of it over the groups, in place; this worker's group."""
    group = training.tensor_parallel
    replicas = dist.get_world_size() // group
    over = {"replicas": replicas, "shards": 1} if training.strategy == "ddp" else {"shards": replicas}
    mesh = mesh_of_workers(next(model.parameters()).device, {**over, _GROUP: group}, timeout_s=timeout_s)
    share_layers(layers, mesh[_GROUP])
    shard(model, layers, mesh[tuple(over)])
    return mesh.get_group(_GROUP)


def _is_shared_out(tensor: DTensor) -> bool:
    """Whether each worker of a group has another part of it."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return _GROUP in names and not tensor.placements[names.index(_GROUP)].is_replicate()


def _holders(tensor: DTensor) -> int:
    """Workers that hold the same part of a tensor."""
    mesh = tensor.device_mesh
    parts = prod(mesh.size(dim) for dim, placed in enumerate(tensor.placements) if not placed.is_replicate())
    return dist.get_world_size() // parts


def _qkv(state: Mapping[str, Any]) -> list[DTensor]:
    """The weights of queries, keys and values in the state of an engine, and what its optimizers keep of them."""
    weights = [tensor for name, tensor in state["model"].items() if QKV in name]
    kept = [one for name, some in state["optimizer"]["state"].items() if QKV in name for one in some.values()]
    return [tensor for tensor in (*weights, *kept) if isinstance(tensor, DTensor)]


def _with_qkv(state: Mapping[str, Any], change: Callable[[DTensor], DTensor]) -> dict[str, Any]:
    """The same state with each of these changed."""

    def changed(name: str, tensor: Any) -> Any:
        return change(tensor) if QKV in name and isinstance(tensor, DTensor) else tensor

    moments = state["optimizer"]["state"]
    return {
        "model": {name: changed(name, tensor) for name, tensor in state["model"].items()},
        "optimizer": {
            "state": {name: {key: changed(name, one) for key, one in some.items()} for name, some in moments.items()}
        },
    }
