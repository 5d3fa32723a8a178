"""Which of torch's kernels computes attention: torch's own choice, the job's, or the fastest when a run begins."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError, first_line
from tokendrop.train.device import pick_dtype
from tokendrop.train.reader import from_rank_0

_KERNELS: Mapping[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
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
def attention_by(
    config: ExperimentConfig,
    device: torch.device,
    group: Any,
    *,
    start: int,
    world_size: int,
    known: Mapping[str, Any] | None = None,
) -> Iterator[Mapping[str, Any] | None]:
    """Within the block, of which there is one at a time in a process, attention is computed as the job says.

    Where a kernel can't, as with padding, another one does.

    Args:
        group: of all ranks, which take what rank 0 has measured; None for one process alone.
        start: the step that the run goes on from.
        known: what rank 0 chose on such a device before: equal numbers want the same kernel to the end of a run.
    Yields:
        For the run's record, the kernel, and the seconds of each that ran; None where torch chooses at each call.
    Raises:
        UserError: the kernel does not run on this device in the job's precision.
    """
    if config.train.attention == "auto":
        yield None
        return
    chosen = from_rank_0(partial(_chosen, config, device, start, world_size, known), group)
    # not flash beside cudnn: torch heeds the order on GPUs alone
    others = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH] if chosen["kernel"] != "math" else []
    with (
        sdpa_kernel([_KERNELS[chosen["kernel"]], *others], set_priority=True),
        # whose key says nothing of kernels: it would hand on a graph with another one
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield chosen


def _chosen(
    config: ExperimentConfig, device: torch.device, start: int, world_size: int, known: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    wanted, dtype = config.train.attention, pick_dtype(config.train.precision, device)
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise UserError("train.attention: on a CPU in bf16, attention is computed by matrix products; want auto")
    if wanted == "measured" and known is not None and known.get("kernel") in _KERNELS:
        return known
    calls = attention_calls(config, start=start, world_size=world_size)
    kernels = [*_KERNELS] if wanted == "measured" else [wanted]
    seconds, why_not = attention_seconds(calls, device=device, dtype=dtype, kernels=kernels)
    if not seconds:
        raise UserError(
            f"train.attention: '{wanted}' does not run on this {device.type} in {str(dtype).removeprefix('torch.')}"
            f" ({why_not}); want auto, or measured"
        )
    return {"kernel": min(seconds, key=lambda kernel: seconds[kernel]), "seconds": seconds}


def attention_calls(config: ExperimentConfig, *, start: int, world_size: int) -> Sequence[AttentionCall]:
    """What all layers ask for in one micro batch, at steps evenly spaced over those from `start` on."""
    plan, shape, heads = config.plan, config.model.shape, config.model.heads
    ahead = plan.steps - start
    calls: list[AttentionCall] = []
    for step in dict.fromkeys(start + (2 * part + 1) * ahead // (2 * _STEPS) for part in range(_STEPS)):
        segment = plan.at(min(step, plan.steps - 1))
        kept = segment.kept_by_layer if plan.routes.counts == "tokens" else {}
        calls += [
            AttentionCall(
                sequences=plan.split(segment, world_size).micro_batch,
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
) -> tuple[dict[str, float], str]:
    """Seconds that all calls take, forward and backward, by each kernel that can compute all of them; and why the last
    of the others can't."""
    found: dict[str, float] = {}
    why_not = ""
    for kernel in kernels:
        try:
            of = {call: _seconds(call, _KERNELS[kernel], device, dtype) for call in dict.fromkeys(calls)}
        except torch.AcceleratorError:  # after which the device is of no use
            raise
        except RuntimeError as error:  # not here, not in this dtype, not for such a head, or not in this memory
            why_not = first_line(error)
        else:
            found[kernel] = sum(of[call] for call in calls)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found, why_not


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
