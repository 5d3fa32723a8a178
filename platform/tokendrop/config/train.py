"""How it is trained."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tokendrop.config.traced_steps import TracedSteps
from tokendrop.schedule.activations import Activations
from tokendrop.schedule.device import STATE_BYTES
from tokendrop.schedule.duration import Duration
from tokendrop.schedule.learning_rate import Decay
from tokendrop.schedule.micro_batch import MicroBatchGrowth, TokensAtOnce
from tokendrop.schedule.plan import LrClock, RunPlan
from tokendrop.schedule.traffic import GroupSplit, Sharding

AttentionKernel = Literal["auto", "flash", "cudnn", "efficient", "math", "measured"]
# DeepSpeed's ZeRO is mapped to AdamW's moments; Muon needs each matrix whole
STRATEGIES_OF = {"adamw": ("ddp", "fsdp", "deepspeed"), "sgd": ("ddp", "fsdp"), "muon": ("ddp",)}
_BYTES = re.compile(r"(?P<amount>[0-9]{1,9}(\.[0-9]{1,9})?) ?(?P<unit>[MGT]i?B)")
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# A moment in bf16 has 8 bits: rounded to the nearest, what changes it by less than 2**-8 of itself may be lost. A step
# changes it by 1 - beta of what it lacks, so it may stay off by 2**-8 / (1 - beta) of itself: 8% at 0.95, 20% at 0.98,
# by which Adam's steps are off by 10%; at 0.996 by all of it, and it would never decay.
_MOST_BETA_IN_BF16 = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Length, batch, optimizer and precision of a run."""

    length: Duration
    """How long: `300e9 tokens`, `2000000 steps` or `3 epochs`."""
    global_batch: int
    """Sequences of one optimizer step, over all workers."""
    micro_batch: int
    """Sequences that one worker runs at a time; the rest is accumulated."""
    tokens_per_micro_batch: TokensAtOnce | None = None
    """Runs several micro batches as one where layers see fewer tokens: as many as show a dropped layer at most so many
    tokens, or auto: as many as keep no more activations than one does at full length. Samples and draws stay."""
    peak_lr: float
    final_lr: float = 0.0
    warmup: Duration = Duration.parse("1%")
    """Of the step schedule; with `lr_clock: layer_token` it lasts as many layer tokens (appendix C)."""
    decay: Decay = "cosine"
    lr_clock: LrClock = "step"
    cooldown: Duration = Duration.parse("20%")
    """Of `decay: wsd` (warm-up, stable, decay): how long the decay at the end lasts, counted as `warmup`."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """muon: for the layers' matrices, with adamw for embeddings, biases, norms and heads."""
    momentum: float = 0.9
    """Of sgd and muon; for muon 0.95 is usual."""
    optimizer_state: Literal["fp32", "bf16"] = "fp32"
    """bf16: moments are kept in bf16 between steps, in half of the memory, and in checkpoints; updates are computed as
    exact as the weights. fp32: as the weights. A checkpoint of the one is read as the other, as at a fork."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    """auto: bf16 autocast where the device computes in bf16, else fp32."""
    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Matrix products of the layers in fp8, by torchao, with a scale for each tensor, or for each row: closer, slower.
    Weights, gradients, optimizer state and checkpoints stay as they are. Meant for models from 1.3B parameters on."""
    fp8_emulated: bool = False
    """Compute what fp8 would, slowly, on a device without it: to try a job."""
    compile: bool | Literal["static"] = False
    """torch.compile each layer, before the first step: at most three graphs, however many kept lengths; or static, a
    faster one for each of them. Meant for GPUs."""
    cuda_graphs: bool = False
    """Run each of the static graphs as a CUDA graph: the GPU is given a layer at once, not kernel by kernel. Meant
    for short kept lengths."""
    attention: AttentionKernel = "auto"
    """Torch's kernel: its own choice (auto), flash, cudnn, efficient or math, or the fastest for the run's shapes when
    it begins (measured)."""
    activation_checkpointing: bool | str = False
    """Compute each layer's activations again in the backward pass, from the same kept tokens. Bytes, such as `20 GB`:
    only in those parts of the run whose micro batch would keep more than that on a worker. Kept are activations, the
    head's gradient and autocast's copies of weights; not weights, gradients, optimizer state and what is there for
    moments. Losses and weights are the same, bit for bit."""
    strategy: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    """How workers hold the model: all of it each, or shares. A run that goes on may do so under another strategy."""
    tensor_parallel: int = 1
    """Workers that train each micro batch together, every one with its share of the layers' heads and MLPs: a model of
    kind gpt or bert. The workers are a multiple of it; a run that goes on may have another one."""
    context_parallel: int = 1
    """Workers that train each micro batch together, every one with its share of each layer's tokens; as above. One of
    the two is 1."""
    zero_stage: Literal[1, 2, 3] | None = None
    """Of `strategy: deepspeed`: share out the optimizer state (1, the default), gradients too (2), weights too (3)."""
    profile: TracedSteps | None = None
    """Steps whose trace and summary by phase are written into the run's `profile` folder."""

    @property
    def sharding(self) -> Sharding:
        """How workers share the model out."""
        stages: dict[int, Sharding] = {1: "zero_1", 2: "zero_2", 3: "zero_3"}
        return stages[self.zero_stage or 1] if self.strategy == "deepspeed" else self.strategy

    @property
    def group(self) -> int:
        """Workers that train each micro batch together."""
        return self.tensor_parallel * self.context_parallel

    @property
    def group_split(self) -> GroupSplit:
        """What they share out."""
        return "layers" if self.context_parallel == 1 else "tokens"

    @property
    def group_key(self) -> str:
        """The key that says how many they are."""
        return "tensor_parallel" if self.context_parallel == 1 else "context_parallel"

    @property
    def state_bytes(self) -> int:
        """Of one parameter in a checkpoint: the weight and two moments, AdamW's; others have no more."""
        return STATE_BYTES if self.optimizer_state == "fp32" else 4 + 2 * 2

    @property
    def activation_limit(self) -> int | None:
        """Bytes that a micro batch may keep before layers are computed again; None for no such limit.

        Raises:
            ValueError: the text is no amount of bytes.
        """
        if isinstance(self.activation_checkpointing, bool):
            return None
        match = _BYTES.fullmatch(self.activation_checkpointing)
        if match is None:
            raise ValueError(
                "activation_checkpointing: want true, false, or bytes such as 20 GB or 16 GiB, got"
                f" {self.activation_checkpointing!r}"
            )
        return int(Fraction(match["amount"]) * _UNITS[match["unit"]])

    def growth(self, *, dropout: float) -> MicroBatchGrowth:
        """How the micro batches of a model with such dropout grow where kept lengths are short, and what they keep."""
        exact = 8 if self.precision == "fp64" else 4
        activations = Activations(
            recomputed=self.activation_checkpointing is True,
            limit=self.activation_limit,
            exact_bytes=exact,
            product_bytes=2 if self.precision == "bf16" else exact,
            tensor_parallel=self.tensor_parallel,
            context_parallel=self.context_parallel,
            has_dropout=dropout > 0,
        )
        return MicroBatchGrowth(tokens=self.tokens_per_micro_batch, activations=activations)

    @property
    def groups(self) -> str:
        """What updates which parameters."""
        decay = f"weight decay {self.weight_decay:g} of matrices, none of biases and norms"
        of = {
            "adamw": f"adamw ({self.beta1:g}, {self.beta2:g})",
            "sgd": f"sgd, momentum {self.momentum:g}",
            "muon": f"muon, momentum {self.momentum:g}, of the layers' matrices;"
            f" adamw ({self.beta1:g}, {self.beta2:g}) of the rest",
        }
        state = "; state in bf16" if self.optimizer_state == "bf16" else ""
        return f"{of[self.optimizer]}; {decay}{state}"

    def check(self, *, steps: int, dropout: float) -> None:
        """Raises ValueError where so many steps of a model with such dropout can't be trained so."""
        if self.profile is not None and self.profile.last > steps:
            raise ValueError(
                f"train.profile.steps: the run ends with step {steps}, got {self.profile.steps!r}; want steps up to"
                " that"
            )
        if self.tokens_per_micro_batch is not None and dropout:
            raise ValueError(
                "train.tokens_per_micro_batch: dropout is drawn for each micro batch, so losses would depend on the"
                " number of workers; want model.dropout: 0, or leave it out"
            )

    def check_group(self, *, kind: str, heads: int, dropout: float) -> None:
        """Raises ValueError where a model can't be trained by groups of workers."""
        if self.group == 1:
            return
        if kind not in ("gpt", "bert"):
            raise ValueError(f"train.{self.group_key}: want a model of kind gpt or bert to share out, got '{kind}'")
        if heads % self.tensor_parallel:
            raise ValueError(
                f"model.heads: train.tensor_parallel={self.tensor_parallel} workers share the heads out evenly; want a"
                f" multiple of it, got {heads}"
            )
        if dropout:
            raise ValueError(
                f"train.{self.group_key}: workers that share a layer out would each draw dropout of their own; want"
                f" model.dropout: 0, got {dropout:g}"
            )

    def check_activations(self, plan: RunPlan) -> None:
        """Raises ValueError where a micro batch keeps too much although its layers are computed again."""
        kept, start = max((segment.activation_bytes or 0, -segment.start) for segment in plan.segments)
        if self.activation_limit is not None and kept > self.activation_limit:
            raise ValueError(
                f"train.activation_checkpointing: from step {-start} on a micro batch keeps {kept / 1e9:.4g} GB even"
                f" with its layers computed again, got {self.activation_checkpointing!r}; want more, or a smaller"
                " train.micro_batch"
            )

    def __post_init__(self) -> None:
        if self.length.unit == "%" or self.length.amount <= 0:
            raise ValueError(f"length: want steps, tokens or epochs, more than 0, got {self.length}")
        if self.global_batch < 1 or self.micro_batch < 1:
            sizes = f"{self.global_batch} and {self.micro_batch}"
            raise ValueError(f"want global_batch and micro_batch of at least 1, got {sizes}")
        if isinstance(self.tokens_per_micro_batch, int) and self.tokens_per_micro_batch < 1:
            raise ValueError(f"tokens_per_micro_batch: want at least 1, or auto, got {self.tokens_per_micro_batch}")
        if self.activation_limit is not None and self.precision == "auto":
            raise ValueError(
                "activation_checkpointing: how many bytes are kept is a matter of precision, which 'auto' leaves to the"
                " device; want precision bf16, fp32 or fp64 beside it"
            )
        if self.strategy == "deepspeed" and self.precision == "fp64":
            raise ValueError(
                "precision: strategy 'deepspeed' keeps weights in fp32; want auto, bf16 or fp32, got 'fp64'"
            )
        if self.strategy not in STRATEGIES_OF[self.optimizer]:
            raise ValueError(
                f"optimizer: '{self.optimizer}' works with strategy {' and '.join(STRATEGIES_OF[self.optimizer])}, not"
                f" '{self.strategy}', which wants adamw"
            )
        self._check_groups()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"want 0 <= momentum < 1, got {self.momentum:g}")
        if self.optimizer_state == "bf16":
            self._check_bf16_state()
        self._check_graphs()
        if self.strategy != "deepspeed" and self.zero_stage is not None:
            raise ValueError(f"strategy is {self.strategy!r}, so zero_stage={self.zero_stage} would do nothing")
        if not 0 <= self.final_lr <= self.peak_lr:
            raise ValueError(f"want 0 <= final_lr <= peak_lr, got {self.final_lr:g}, {self.peak_lr:g}")
        if self.peak_lr <= 0 or self.weight_decay < 0 or self.max_grad_norm <= 0 or self.epsilon <= 0:
            raise ValueError("want peak_lr, max_grad_norm and epsilon above 0, and weight_decay of at least 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"want 0 <= beta1, beta2 < 1, got {self.beta1}, {self.beta2}")

    def _check_graphs(self) -> None:
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile: not with zero_stage=3, whose gathering breaks graphs; want strategy 'fsdp'")
        if self.cuda_graphs and (self.compile != "static" or self.strategy != "ddp"):
            raise ValueError(
                "cuda_graphs: want compile: static, whose shapes are known, and strategy ddp, whose weights stay where"
                f" they are; got {self.compile!r} and '{self.strategy}'"
            )

    def _check_groups(self) -> None:
        sizes = {"tensor_parallel": self.tensor_parallel, "context_parallel": self.context_parallel}
        for key, size in sizes.items():
            if size < 1:
                raise ValueError(f"want {key} of at least 1, got {size}")
        if min(sizes.values()) > 1:
            raise ValueError(
                "context_parallel: not beside tensor_parallel; want one of them to be 1, got"
                f" {self.context_parallel} and {self.tensor_parallel}"
            )
        key, size = self.group_key, self.group
        if size > 1 and self.compile:
            raise ValueError(f"compile: not with {key}={size}, whose exchanges break graphs; want false, or {key}=1")
        if self.tensor_parallel > 1 and self.strategy == "deepspeed":
            raise ValueError(f"{key}: strategy 'deepspeed' has none; want ddp or fsdp with {size}, or 1")
        if self.tensor_parallel > 1 and self.optimizer == "muon":
            raise ValueError(f"{key}: optimizer 'muon' needs each matrix whole; want adamw or sgd with {size}, or 1")

    def _check_bf16_state(self) -> None:
        if self.strategy == "deepspeed":
            raise ValueError(
                "optimizer_state: strategy 'deepspeed' keeps it in fp32; want strategy ddp or fsdp for bf16"
            )
        adam = {} if self.optimizer == "sgd" else {"beta1": self.beta1, "beta2": self.beta2}
        decays = adam if self.optimizer == "adamw" else {"momentum": self.momentum, **adam}
        for key, decay in decays.items():
            if decay > _MOST_BETA_IN_BF16:
                raise ValueError(
                    f"{key}: with optimizer_state 'bf16', whose 8 bits lose smaller changes, want at most"
                    f" {_MOST_BETA_IN_BF16:g}, got {decay:g}"
                )
