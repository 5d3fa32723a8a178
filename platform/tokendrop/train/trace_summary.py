"""Where the time of traced steps went, as a run's folder keeps it. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokendrop.errors import DamagedDataError
from tokendrop.train.sealed import read_sealed_json, seal_json

PROFILE = "profile"
"""The folder of what `train.profile` leaves, below the run's."""
_SUMMARY = "summary.json"


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """Write it with its checksum; the folder `PROFILE` is there."""
    (run / PROFILE / _SUMMARY).write_text(seal_json(summary), encoding="utf-8")


def read_summary(run: Path) -> dict[str, Any] | None:
    """What was written; None where no step was traced, or the file is damaged."""
    try:
        return read_sealed_json(run / PROFILE / _SUMMARY)
    except DamagedDataError:
        return None
