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
    """A checkpoint that is not the first one: its pinned memory is there."""

    bytes: int
    blocked_s: float
    """Until training may go on."""
    committed_s: float


def save_twice(engine: Engine) -> Save | None:
    """Save into the folder of temporary files; None where that has too little room."""
    weights = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    if shutil.disk_usage(tempfile.gettempdir()).free < _ROOM * weights:
        return None
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as folder:
        checkpoints = Checkpoints(Path(folder), keep=1, meta={})
        checkpoints.save(engine, 1)
        checkpoints.wait()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        began = time.perf_counter()
        checkpoints.save(engine, 2)
        blocked_s = time.perf_counter() - began
        checkpoints.wait()
        committed_s = time.perf_counter() - began
        size = sum(file.stat().st_size for file in Path(folder).glob("step_*/*"))
    return Save(bytes=size, blocked_s=blocked_s, committed_s=committed_s)
