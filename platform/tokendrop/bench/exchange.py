"""How fast two processes of one machine sum gradients."""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tokendrop.schedule.device import Link

_SMALL, _REPEATS = 2**8, 15  # float32 values


def measure_link(*, values: int = 2**22) -> tuple[Link, str]:
    """Bandwidth and latency of an all-reduce between two local processes, and its backend.

    Args:
        values: float32 values that are summed to see the bandwidth.
    """
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    with tempfile.TemporaryDirectory(prefix="tokendrop-profile-") as folder:
        mp.spawn(_member, args=(folder, backend, values), nprocs=2)
        small, large = json.loads((Path(folder) / "seconds.json").read_text())
    moved = 4 * (values - _SMALL)  # a ring of two sends each byte once, in two messages
    return Link(bytes_per_s=moved / max(large - small, 1e-9), latency_s=small / 2), backend


def _member(rank: int, folder: str, backend: str, values: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seconds = [_all_reduce_s(torch.zeros(count, device=device)) for count in (_SMALL, values)]
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _all_reduce_s(tensor: torch.Tensor) -> float:
    """The median of some; one before them warms up."""
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
