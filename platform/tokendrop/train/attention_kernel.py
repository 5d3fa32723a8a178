"""Which of torch's kernels computes attention: torch's own choice, the job's, or the fastest when a worker starts."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.train import AttentionKernel
from tokendrop.errors import UserError
from tokendrop.train.device import pick_dtype
from tokendrop.train.reader import from_rank_0

_KERNELS: Mapping[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_STEPS = 8  # of a run at which kernels are timed, evenly spaced
_WARM_UPS, _RUNS = 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer asks for."""

    sequences: int
    heads: int
    tokens: int
    head_width: int
    causal: bool


@contextmanager
def attention_by(config: ExperimentConfig, device: torch.device, group: Any, *, start: int) -> Iterator[dict[str, Any]]:
    """Within the block, of which there is one at a time in a process, attention is computed as the job says.

    Where a kernel can't, as with padding, another one does.

    Args:
        group: of all ranks, which take what rank 0 has measured; None for one process alone.
        start: the step that the run goes on from.
    Yields:
        The kernel, for the run's record, and the seconds of each that ran; none where torch chooses at each call.
    Raises:
        UserError: the kernel does not run on this device in the job's precision.
    """
    if config.train.attention == "auto":
        yield {"kernel": "auto"}
        return
    chosen = from_rank_0(partial(_chosen, config, device, start), group)
    # not flash beside cudnn: torch heeds the order on GPUs alone
    others = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH] if chosen["kernel"] != "math" else []
    with sdpa_kernel([_KERNELS[chosen["kernel"]], *others], set_priority=True):
        yield chosen


def _chosen(config: ExperimentConfig, device: torch.device, start: int) -> dict[str, Any]:
    wanted: AttentionKernel = config.train.attention
    calls = attention_calls(config, start=start)
    kernels = [*_KERNELS] if wanted == "measured" else [wanted]
    dtype = pick_dtype(config.train.precision, device)
    seconds = attention_seconds(calls, device=device, dtype=dtype, kernels=kernels)
    if not seconds:
        some = f"{calls[0].tokens} tokens, heads of {calls[0].head_width}"
        raise UserError(
            f"train.attention: '{wanted}' does not run on this {device.type} in {str(dtype).removeprefix('torch.')}"
            f" ({some}); want auto, or measured"
        )
    return {"kernel": min(seconds, key=lambda kernel: seconds[kernel]), "seconds": seconds}


def attention_calls(config: ExperimentConfig, *, start: int) -> Sequence[AttentionCall]:
    """What all layers ask for in one micro batch, at steps evenly spaced over those from `start` on."""
    plan, shape, heads = config.plan, config.model.shape, config.model.heads
    ahead = plan.steps - start
    calls: list[AttentionCall] = []
    for step in dict.fromkeys(start + (2 * part + 1) * ahead // (2 * _STEPS) for part in range(_STEPS)):
        segment = plan.at(min(step, plan.steps - 1))
        kept = segment.kept_by_layer if plan.routes.counts == "tokens" else {}
        calls += [
            AttentionCall(
                sequences=segment.micro_batch,
                heads=heads,
                tokens=kept.get(layer, shape.sequence_length),
                head_width=shape.width // heads,
                causal=shape.causal,
            )
            for layer in range(shape.layers)
        ]
    return calls


def attention_seconds(
    calls: Sequence[AttentionCall], *, device: torch.device, dtype: torch.dtype, kernels: Sequence[str]
) -> dict[str, float]:
    """Seconds that all calls take, forward and backward, by each kernel that can compute all of them."""
    found: dict[str, float] = {}
    for kernel in kernels:
        try:
            of = {call: _seconds(call, _KERNELS[kernel], device, dtype) for call in dict.fromkeys(calls)}
        except RuntimeError:  # torch's word for: not here, not in this dtype, not for such a head
            continue
        found[kernel] = sum(of[call] for call in calls)
    return found


def _seconds(call: AttentionCall, kernel: SDPBackend, device: torch.device, dtype: torch.dtype) -> float:
    size = call.sequences, call.heads, call.tokens, call.head_width
    q_BHSW, k_BHSW, v_BHSW = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad_BHSW = torch.randn(size, device=device, dtype=dtype)

    def run() -> None:
        with sdpa_kernel(kernel):
            out_BHSW: Tensor = F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, is_causal=call.causal)
        out_BHSW.backward(grad_BHSW)

    for _ in range(_WARM_UPS):
        run()
    times: list[float] = []
    for _ in range(_RUNS):
        _synchronize(device)
        began = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
