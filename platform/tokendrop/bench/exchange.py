"""How fast two processes of one machine sum and gather."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tokendrop.schedule.device import Link

_SMALL, _REPEATS = 2**8, 15  # float32 values


def measure_link(*, values: int = 2**22) -> tuple[Link, str]:
    """Bandwidth and latency of all-reduces and all-gathers between two local processes, and their backend.

    Args:
        values: float32 values that are exchanged to see the bandwidth.
    """
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    with tempfile.TemporaryDirectory(prefix="tokendrop-profile-") as folder:
        mp.spawn(_member, args=(folder, backend, values), nprocs=2)
        summed, gathered = json.loads((Path(folder) / "seconds.json").read_text())
    moved = 4 * (values - _SMALL)  # a ring of two sums by sending each byte once, and gathers by sending half of them
    return Link(
        bytes_per_s=moved / max(summed[1] - summed[0], 1e-9),
        gather_bytes_per_s=moved / 2 / max(gathered[1] - gathered[0], 1e-9),
        latency_s=summed[0] / 2,  # two messages
    ), backend


def _member(rank: int, folder: str, backend: str, values: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seconds = [
        [_median_s(exchange, torch.zeros(count, device=device)) for count in (_SMALL, values)]
        for exchange in (dist.all_reduce, _all_gather)
    ]
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _all_gather(whole: Tensor) -> None:
    halves = list(whole.chunk(2))
    dist.all_gather(halves, halves[dist.get_rank()].clone())


def _median_s(exchange: Callable[[Tensor], object], tensor: Tensor) -> float:
    """The median of some; one before them warms up."""
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        started = time.perf_counter()
        exchange(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
