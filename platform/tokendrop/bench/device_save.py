"""How long training waits for a checkpoint on this device."""

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.engines.base import Engine

_ROOM = 9  # times the bytes of the weights: three checkpoints, each of the weights and two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Two checkpoints, one after the other."""

    bytes: int
    """Of one."""
    blocked_s: float
    """Until training may go on, of the second, whose pinned memory is there."""
    committed_s: float
    first_blocked_s: float
    """The same of the first, which takes that memory: as after each start of a worker."""
    took_s: float
    """Both."""


def save_twice(engine: Engine) -> Save | None:
    """Save into the folder of temporary files; None where that has too little room."""
    weights = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    if shutil.disk_usage(tempfile.gettempdir()).free < _ROOM * weights:
        return None
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as folder:
        checkpoints = Checkpoints(Path(folder), keep=1, meta={})
        started = time.perf_counter()
        checkpoints.save(engine, 1)
        first_blocked_s = time.perf_counter() - started
        checkpoints.wait()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        began = time.perf_counter()
        checkpoints.save(engine, 2)
        blocked_s = time.perf_counter() - began
        checkpoints.wait()
        ended = time.perf_counter()
        size = sum(file.stat().st_size for file in Path(folder).glob("step_*/*"))
    return Save(
        bytes=size,
        blocked_s=blocked_s,
        committed_s=ended - began,
        first_blocked_s=first_blocked_s,
        took_s=ended - started,
    )
