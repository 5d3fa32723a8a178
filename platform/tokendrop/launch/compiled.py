"""What the workers of a run have compiled, for those that follow them: on machines that have compiled nothing yet.

It is code, so it is for workers of one driver alone: it goes into no store, and a driver that comes later forgets it.
"""

from contextlib import suppress
from pathlib import Path

import torch

from tokendrop.atomic import atomic_write
from tokendrop.elastic.control import RunControl


def take_compiled(run: Path) -> None:
    """Let this process find what workers of the run have compiled, by code, shapes and device."""
    with suppress(FileNotFoundError):
        torch.compiler.load_cache_artifacts(RunControl(run).compiled.read_bytes())


def leave_compiled(run: Path) -> None:
    """Leave what this process has compiled, or has found compiled, to workers that come later."""
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        atomic_write(RunControl(run).compiled, artifacts[0])
