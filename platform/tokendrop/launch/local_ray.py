"""A Ray for this process alone: nobody else is let in, and nothing of it stays."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from tokendrop.errors import UserError
from tokendrop.launch import cleanup
from tokendrop.launch.loopback import close_to_others


def start_local_ray(cpus: int | None, **options: Any) -> None:
    """Start it.

    Args:
        cpus: cores that it counts; those of the machine when left out.
        options: of `ray.init`.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_device())  # for the traffic between workers
    close_to_others()
    folder = _new_folder()
    with _environment({cleanup.FOLDER_VARIABLE: folder, "RAY_TMPDIR": folder}):
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=400 * 2**20, **options)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What processes of Ray inherit, and those that this process starts by itself do not."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
