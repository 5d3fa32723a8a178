"""How fast two processes sum and gather, on one machine or on two."""

import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tokendrop.schedule.device import Link

VALUES = 2**22
"""float32 values that are exchanged to see the bandwidth."""
_SMALL, _REPEATS = 2**8, 15  # float32 values


def measure_link(*, values: int = VALUES) -> tuple[Link, str]:
    """Bandwidth and latency of all-reduces and all-gathers between two local processes, and their backend."""
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    with tempfile.TemporaryDirectory(prefix="tokendrop-profile-") as folder:
        mp.spawn(_member, args=(folder, backend, values), nprocs=2)
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    return link_of(seconds, values=values), backend


def link_of(seconds: list[list[float]], *, values: int) -> Link:
    """The link over which so many values take the seconds that `exchange` found."""
    summed, gathered = seconds
    moved = 4 * (values - _SMALL)  # a ring of two sums by sending each byte once, and gathers by sending half of them
    return Link(
        bytes_per_s=moved / max(summed[1] - summed[0], 1e-9),
        gather_bytes_per_s=moved / 2 / max(gathered[1] - gathered[0], 1e-9),
        latency_s=summed[0] / 2,  # two messages
    )


def exchange(
    rank: int, meeting: str, *, device: torch.device, values: int, timeout: timedelta | None = None
) -> list[list[float]]:
    """Take part in sums and gathers of two; returns the seconds of each, of few values and of `values`.

    Args:
        meeting: where the two meet, as torch's `init_method`.
        timeout: so long each waits for the other; torch's own when left out.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=2, timeout=timeout)
    try:
        return [
            [_median_s(operation, torch.zeros(count, device=device)) for count in (_SMALL, values)]
            for operation in (dist.all_reduce, _all_gather)
        ]
    finally:
        dist.destroy_process_group()


def _member(rank: int, folder: str, backend: str, values: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    seconds = exchange(rank, f"file://{folder}/store", device=device, values=values)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))


def _all_gather(whole: Tensor) -> None:
    halves = list(whole.chunk(2))
    dist.all_gather(halves, halves[dist.get_rank()].clone())


def _median_s(operation: Callable[[Tensor], object], tensor: Tensor) -> float:
    """The median of some; one before them warms up."""
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        started = time.perf_counter()
        operation(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
