"""How much longer the workers of a full node take than one alone: they share its memory and caches."""

import json
import tempfile
from pathlib import Path
from statistics import median
from threading import Barrier

import torch
import torch.multiprocessing as mp

from tokendrop.config.experiment import ExperimentConfig

_SHARES = (16, 1)  # of the sequence, that layers see: little work beside all the weights, and much


def measure_slowdown(config: ExperimentConfig, *, workers: int, devices: int, rounds: int) -> float:
    """Times as long a step takes where all devices of this machine are at work as where one is, at least 1.

    Args:
        workers: so many do steps of their own at once, beside which one does so while the others wait.
        devices: of the machine; where there are fewer workers, their slowdown is taken to grow in proportion.
    """
    if workers < 2:
        return 1.0
    with tempfile.TemporaryDirectory(prefix="tokendrop-profile-") as folder:
        turn = mp.get_context("spawn").Barrier(workers)
        mp.spawn(_worker, args=(folder, config, turn, rounds), nprocs=workers)
        times = json.loads((Path(folder) / "times.json").read_text())
    return 1 + max(0.0, median(times) - 1) * (devices - 1) / (workers - 1)


def _worker(rank: int, folder: str, config: ExperimentConfig, turn: Barrier, rounds: int) -> None:
    from tokendrop.bench.step import timed_step
    from tokendrop.train.device import pick_device, tune_cpu
    from tokendrop.train.worker import build_engine

    tune_cpu(config.scaling.cpus_per_worker)
    device, length = pick_device(rank), config.model.sequence_length
    if device.type == "cuda":
        torch.cuda.set_device(device)  # which `timed_step` waits for
    engine, dropping = build_engine(config, device)
    batch = config.task.build(config).random_batch(config.train.micro_batch, device)

    def steps_s() -> float:
        lengths = [max(1, length // share) for share in _SHARES]
        return sum(timed_step(engine, dropping, batch, kept_length=k, sequence_length=length) for k in lengths)

    steps_s()
    times: list[float] = []
    for _ in range(rounds):
        turn.wait()
        alone = steps_s() if rank == 0 else 0.0
        turn.wait()
        together = steps_s()
        times.append(together / alone if rank == 0 else 0.0)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
