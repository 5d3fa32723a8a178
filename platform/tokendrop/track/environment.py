"""environment.json of a run: what its driver and its workers run on."""

import getpass
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tokendrop.atomic import atomic_write
from tokendrop.secrets import redact_all

_PACKAGES = ("tokendrop", "torch", "ray", "mlflow", "pyarrow", "numpy", "tokenizers", "deepspeed")


def describe_driver(path: Path) -> None:
    """Write what this process, the driver of a run, runs on and comes from; what its workers said before stays."""
    _write(path, {**environment(), "origin": origin(), "workers": _read(path).get("workers")})


def origin() -> dict[str, str]:
    """Where what this process does comes from, as far as it is known, without secrets.

    `command`, `source` (the job file in it, else the program), `user`, and `source_commit`, of the checkout that the
    working directory is in.
    """
    program, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    files = [one for one in arguments if one.endswith((".yaml", ".yml")) and "=" not in one]
    found: dict[str, str | None] = {
        "command": shlex.join([program, *arguments]),
        "source": files[0] if files else program,
        "user": _user(),
        "source_commit": _commit(Path.cwd()),
    }
    return redact_all({key: value for key, value in found.items() if value})


def origin_of(path: Path) -> dict[str, str]:
    """The origin of a run that its environment.json tells of; empty where it tells of none."""
    found = _read(path).get("origin")
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # it has no name here, as in a container
        return None


def describe_workers(path: Path, device: Mapping[str, Any]) -> None:
    """Add what this process, one of the workers, runs on; another machine and other packages, perhaps.

    Args:
        device: as `train.device.describe_device` has it.
    """
    _write(path, {**_read(path), "workers": {**environment(), "device": dict(device)}})


def device_of_workers(path: Path) -> dict[str, Any]:
    """What was told last of the device of a run's workers; empty where nothing was."""
    workers = _read(path).get("workers")
    device = workers.get("device") if isinstance(workers, dict) else None
    return device if isinstance(device, dict) else {}


def environment() -> dict[str, Any]:
    """Of this process: versions, machine, commit."""
    return {
        "commit": _commit(Path(__file__).parent),
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": {package: _version(package) for package in _PACKAGES},
    }


def _commit(root: Path) -> str | None:
    """Of the checkout that a folder lies in; None where it lies in none, or there is no git."""
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
