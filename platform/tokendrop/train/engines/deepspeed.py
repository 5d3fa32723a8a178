"""ZeRO by DeepSpeed: every worker holds a share of the optimizer state (1), the gradients too (2), the weights too (3).

Written for the one version that pyproject.toml names: mapping ZeRO's flat partitions to parameters takes attributes
of DeepSpeed's that are not public.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from warnings import filterwarnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tokendrop.models.batch import Batch
from tokendrop.train.engines.base import Engine
from tokendrop.train.installed import check_deepspeed_installed
from tokendrop.train.reader import CheckpointReader, load_into, read_weights
from tokendrop.train.task import Loss, LossFunction

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine(Engine):
    """`Engine` by `deepspeed.initialize`, with fp32 weights and torch's AdamW.

    Checkpoints are what the other engines write. Saving gathers one parameter at a time with its two moments, and
    leaves it to one worker; each holds 12 bytes x parameters / workers of host memory until they are written. Loading
    gives each worker the weights whole, before ZeRO shares them out, then the moments one parameter at a time; storage
    is read once, by all workers together.
    """

    whole_below = 100_000
    """Parameters of fewer elements stay whole on every worker at stage 3."""

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        optimizers: Sequence[Optimizer],
        dtype: torch.dtype,
        *,
        loss: LossFunction,
        stage: int,
    ) -> None:
        check_deepspeed_installed()
        super().__init__(model, optimizers, dtype, loss=loss)
        (self.optimizer,) = self.optimizers
        self.layers, self.stage = layers, stage
        self.parameters = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}

    @cached_property
    def zero(self) -> Any:
        """DeepSpeed's own engine, made at first use: weights are loaded while the model still has them whole."""
        deepspeed = _deepspeed()
        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))  # asked for where no launcher set it
        if self.device.type == "cpu":  # else it compiles an all-reduce of its own now, for half a minute
            deepspeed.ops.__compatible_ops__ = {}
        filterwarnings("ignore", "`torch.distributed", FutureWarning)  # it calls torch's collectives by their old names
        zero, *_ = deepspeed.initialize(
            model=_Autocast(self),
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,  # counted by no one: the loop accumulates
                "zero_optimization": {
                    "stage": self.stage,
                    "reduce_bucket_size": 50_000_000,
                    "stage3_param_persistence_threshold": self.whole_below,
                },
                "steps_per_print": 10**9,
            },
        )
        if self.stage == 3:
            # used outside of the module that owns it: the embedding as head, the positions
            in_layers = set(self.layers.parameters())
            for parameter in self.parameters.values():
                if parameter not in in_layers:
                    deepspeed.zero.register_external_parameter(self.model, parameter)
        return zero

    def forward_backward(self, batch: Batch, *, share: float, last_micro_batch: bool) -> Loss:
        self.zero.set_gradient_accumulation_boundary(last_micro_batch)
        mean, *token_losses = self.zero(batch)
        with self.label("backward"):
            self.zero.backward(mean * share, scale_wrt_gas=False)
        return Loss(mean.detach(), *token_losses)

    def step(self, *, lr: float, max_grad_norm: float) -> Tensor:
        self.set_lr(lr)
        self.zero.optimizer.clip_grad = max_grad_norm
        with self.label("optimizer"):
            self.zero.step()
        return torch.as_tensor(self.zero.get_global_grad_norm())

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Loss:
        self.model.eval()
        parts = self.zero.module(batch)
        self.model.train()
        names = self.zero.module.names
        figures = parts[len(parts) - 2 * len(names) :]
        return Loss(parts[0], figures=dict(zip(names, zip(figures[::2], figures[1::2], strict=True), strict=True)))

    def state(self) -> dict[str, Any]:
        utils = _deepspeed().utils
        self._link_moments()
        step = self.optimizer.state[self._partitions()[0]]["step"].cpu()
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        for number, (name, parameter) in enumerate(self.parameters.items()):
            weight = utils.safe_get_full_fp32_param(parameter)
            full = {key: utils.safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}
            if number % self.world_size == dist.get_rank():
                weights[name] = weight.cpu()
                moments[name] = {"step": step, **{key: value.cpu() for key, value in full.items()}}
        return {"model": weights, "optimizer": {"state": moments}}

    def load(self, reader: CheckpointReader) -> None:
        assert "zero" not in vars(self), "load before the first step"
        read_weights(self.model, reader)
        step = torch.zeros(())
        self._read(reader, next(iter(self.parameters)), {"step": step})
        for flat in self._partitions():
            zeros = {key: torch.zeros_like(flat) for key in _MOMENTS}
            self.optimizer.state[flat] = {"step": step.to(flat.device, copy=True), **zeros}
        self._link_moments()
        for name, parameter in self.parameters.items():
            saved = {key: torch.empty(self.shapes[name]) for key in _MOMENTS}
            self._read(reader, name, saved)
            for key in _MOMENTS:
                self._set_moment(parameter, key, saved[key].to(self.device))

    def _read(self, reader: CheckpointReader, name: str, state: dict[str, Tensor]) -> None:
        """Fill in some of a parameter's optimizer state."""
        load_into({"optimizer": {"state": {name: state}}}, reader)

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        utils = _deepspeed().utils
        if self.stage < 3:
            utils.safe_set_full_optimizer_state(parameter, value, key)
            return
        share: int = parameter.ds_tensor.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
        padded = F.pad(value.flatten(), (0, share * self.world_size - value.numel()))
        utils.safe_set_local_optimizer_state(parameter, padded.view(-1, share)[dist.get_rank()], key)

    def _partitions(self) -> list[Tensor]:
        """This worker's flat shares of the fp32 weights, by which the optimizer keeps its state."""
        zero = self.zero.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _link_moments(self) -> None:
        """Let DeepSpeed find the moments by parameter; by itself it does so once, too early for the second group."""
        if self.stage < 3:
            self.zero.optimizer._hp_optimizer_states_linked = False
            self.zero.optimizer._lazy_init_hp_params_optimizer_state()


def _deepspeed() -> Any:
    """DeepSpeed, imported when it is needed: most runs do without."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    return deepspeed


class _Autocast(nn.Module):
    """The model with autocast inside: DeepSpeed turns off what it is called in, and its own reduces in bf16."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.model = engine.model
        self.run = engine.forward
        self.names: tuple[str, ...] = ()
        """Of the figures of the last loss, which are its last tensors, two each."""

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """The parts of the loss, as a tuple: its hooks look for tensors in nothing else."""
        loss = self.run(self.model, batch)
        self.names = tuple(loss.figures)
        losses = () if loss.token_losses_BS is None else (loss.token_losses_BS,)
        return (loss.mean, *losses, *(part for figure in loss.figures.values() for part in figure))
