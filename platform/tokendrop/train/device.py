"""What the device at hand can do, and how to get it."""

import ctypes
import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from tokendrop.errors import UserError

# parameters of glibc's mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def pick_device(local_rank: int = 0) -> torch.device:
    """This process's GPU, or the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def computes_in_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16, so that autocast is faster and not slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products for a job's `train.precision`.

    Raises:
        UserError: bf16 is asked for on a device that would emulate it.
    """
    if precision == "auto":
        return torch.bfloat16 if computes_in_bf16(device) else torch.float32
    if precision == "bf16" and not computes_in_bf16(device):
        raise UserError(f"train.precision: this {device.type} has no bf16 instructions; want 'auto' or 'fp32'")
    return _DTYPES[precision]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Matrix products in `dtype` where that is less than float32."""
    return torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else nullcontext()


def tune_cpu(threads: int | None = None) -> None:
    """Set torch's threads, and let glibc keep freed memory.

    By default glibc gives large temporaries back to the kernel at once, and every step faults tens of thousands of
    pages in again: a quarter of its time on two cores.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        # threads but the first, and Ray trains in one, allocate from heaps of 64 MiB, which glibc keeps only
        # where the one before has less room than this
        libc.mallopt(_M_TOP_PAD, 2**27)


def compile_layers(layers: torch.nn.ModuleList) -> None:
    """Compile each layer: one graph for the full length, one for every kept length.

    Dynamo's quiet way out, running eagerly after too many graphs, becomes an error: it would pass for a slow GPU.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        layer.compile()
