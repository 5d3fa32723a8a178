"""A Ray for this process alone: nobody else is let in, and nothing of it stays."""

import os
import secrets
import subprocess
import sys
import tempfile
from typing import Any

import psutil
import ray

from tokendrop.errors import UserError
from tokendrop.launch import cleanup

_TOKEN = secrets.token_hex(32)
"""Without it, nobody is let in. Ray reads it once in a process; it is in no file."""

# Nobody reads the statistics that its ten
# processes would gather, nor the log lines that its log monitor would look for, on the cores that train.
_ALONE = {
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "1e9",
}


def start_local_ray(cpus: int | None, **options: Any) -> None:
    """Start it.

    Args:
        cpus: cores that it counts; those of the machine when left out.
        options: of `ray.init`.
    """
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_device())  # for the traffic between workers
    os.environ.pop("RAY_AUTH_MODE", None)  # Ray then asks for a token
    os.environ["RAY_AUTH_TOKEN"] = _TOKEN
    folder = _new_folder()
    os.environ[cleanup.FOLDER_VARIABLE] = folder
    ray.init(
        "local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=400 * 2**20,
        _temp_dir=f"{folder}/ray",
        **options,
    )
    del os.environ[cleanup.FOLDER_VARIABLE]  # what this process starts by itself is not Ray's


def _loopback_device() -> str:
    devices = psutil.net_if_addrs().items()
    return next(name for name, addresses in devices if any(one.address == "127.0.0.1" for one in addresses))


def _new_folder() -> str:
    """A folder for the Ray of this process, which goes when this process does, with all that runs on it.

    Raises:
        UserError: none can be made.
    """
    # short, for the sockets in it; Ray opens its own folder to everybody, but nobody else gets into the one above
    root = os.environ.get("RAY_TMPDIR") or "/tmp"
    try:
        private = tempfile.mkdtemp(prefix="tokendrop-ray-", dir=root)
    except OSError as error:
        raise UserError(f"RAY_TMPDIR: can't make a folder for Ray below {root} ({error.strerror})") from None
    until_our_end, _held_open = os.pipe()
    # out of reach of what is sent to the process group
    subprocess.Popen([sys.executable, cleanup.__file__, private], stdin=until_our_end, start_new_session=True)
    os.close(until_our_end)
    return private
