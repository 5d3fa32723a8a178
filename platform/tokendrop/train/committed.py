"""Checkpoints as folders: their names, what they say of themselves, which of them count. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from tokendrop.errors import UserError

META = "meta.json"


def step_name(step: int) -> str:
    return f"step_{step:09d}"


def committed(folder: Path) -> list[Path]:
    """Committed checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.suffix != ".partial")


def committed_step(folder: Path) -> int:
    """Steps done by the newest committed checkpoint below `folder`; 0 without one."""
    saved = committed(folder)
    return read_meta(saved[-1])["step"] if saved else 0


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        UserError: this is no committed checkpoint.
    """
    try:
        return json.loads((checkpoint / META).read_text())
    except (OSError, ValueError):
        raise UserError(f"{checkpoint}: not a checkpoint (no readable {META} in it)") from None
