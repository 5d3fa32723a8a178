"""What the device at hand can do, and how to get it."""

import ctypes
import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from tokendrop.errors import UserError

# parameters of glibc's mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4

_OF_EVALUATION = 8  # graphs beside those of training; as many as torch allows by default for all

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def pick_device(local_rank: int = 0) -> torch.device:
    """This process's GPU, or the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def describe_device(device: torch.device) -> dict[str, Any]:
    """What a run's record says of the device that a worker trains on, and of the libraries that drive it."""
    if device.type != "cuda":
        processor = _value_of("model name", Path("/proc/cpuinfo")) or platform.processor()
        return {
            "type": device.type,
            "name": processor,
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
    found = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "driver": _value_of("NVRM version", Path("/proc/driver/nvidia/version")),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())),
    }


def _value_of(key: str, file: Path) -> str | None:
    """The value of a line `key: value` in one of the kernel's files; None where it has none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


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


def compile_layers(
    layers: torch.nn.ModuleList, *, static: bool = False, shapes: int = 0, cuda_graphs: bool = False
) -> None:
    """Compile each layer: a graph for the full length, one for the first kept length and one for all others; or one
    for each shape.

    After too many graphs Dynamo would run eagerly without a word; that becomes an error: it would pass for a slow GPU.

    Args:
        static: whether each shape has a graph of its own, whatever comes first.
        shapes: of sequences and tokens that layers are called with in training.
        cuda_graphs: whether they run as CUDA graphs, where they are on a GPU; the engine has to know of it.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if static:  # beside Dynamo's own limit, which leaves room for evaluation
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, shapes + _OF_EVALUATION)
    for layer in layers:
        layer.compile(dynamic=False if static else None, mode="reduce-overhead" if cuda_graphs else None)
