"""What the workers of a run have compiled, for those that follow them: on machines that have compiled nothing yet.

It is code, so it goes into no store, and a driver begins without that of another. Who may write into the folder of a
run that is trained may change what its workers run.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tokendrop.atomic import atomic_write
from tokendrop.elastic.control import RunControl
from tokendrop.errors import first_line


def take_compiled(run: Path) -> None:
    """Let this process find what workers of the run have compiled, by code, shapes and device."""
    compiled = RunControl(run).compiled
    with _going_on("taken"):
        if compiled.exists():
            torch.compiler.load_cache_artifacts(compiled.read_bytes())


def leave_compiled(run: Path) -> None:
    """Leave what this process has compiled, or has found compiled, to workers that come later."""
    with _going_on("left"):
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is not None:
            atomic_write(RunControl(run).compiled, artifacts[0])


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    """Go on where it fails, whatever torch, its caches and the storage do: it saves time, and nothing else."""
    try:
        yield
    except Exception as error:
        print(f"note     compiled code could not be {what}: {first_line(error)}", file=sys.stderr, flush=True)
