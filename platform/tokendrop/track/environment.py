"""environment.json of a run: what its driver and its workers run on."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tokendrop.atomic import atomic_write

_PACKAGES = ("tokendrop", "torch", "ray", "mlflow", "pyarrow", "numpy", "tokenizers", "deepspeed")


def describe_driver(path: Path) -> None:
    """Write what this process, the driver of a run, runs on; what its workers said before stays."""
    _write(path, {**environment(), "workers": _read(path).get("workers")})


def describe_workers(path: Path, device: Mapping[str, Any]) -> None:
    """Add what this process, one of the workers, runs on; another machine and other packages, perhaps.

    Args:
        device: as `train.device.describe_device` has it.
    """
    _write(path, {**_read(path), "workers": {**environment(), "device": dict(device)}})


def environment() -> dict[str, Any]:
    """Of this process: versions, machine, commit."""
    return {
        "commit": _commit(),
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": {package: _version(package) for package in _PACKAGES},
    }


def _commit() -> str | None:
    """Of the checkout that this package lies in; None where it lies in none, or there is no git."""
    root = Path(__file__).parent
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return git.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> dict[str, Any]:
    """What was written before; nothing where it is damaged, for it can be found out again."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    atomic_write(path, json.dumps(content, indent=1).encode())
