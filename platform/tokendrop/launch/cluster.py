"""The Ray cluster at hand: the one that is there, or one for this process."""

import logging
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig
from setproctitle import setproctitle

from tokendrop.errors import UserError, first_line
from tokendrop.launch.head import check_answers
from tokendrop.launch.local_ray import start_local_ray
from tokendrop.output import log
from tokendrop.secrets import redact

_SOURCE_ROOT = Path(__file__).parents[2]


def connect(address: str | None = None, *, cpus: int | None = None, name: str = "") -> None:
    """Join the cluster at `address` or RAY_ADDRESS, else start one on this machine. Does nothing twice.

    Workers get this source tree, so a cluster whose image holds the dependencies alone will do.

    Args:
        cpus: cores that a cluster started here counts; those of the machine when left out.
        name: of what this process does there, for Ray's dashboard; a submitted job keeps its own.
    Raises:
        UserError: there is none at that address.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    errors_alone = {"logging_level": logging.ERROR, "log_to_driver": False}
    for library in ("ray.data", "ray.train"):
        logging.getLogger(library).setLevel(logging.ERROR)
    address = address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        # a submitted job may set PYTHONPATH too; the one here goes on from it
        os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # its dashboard tells of runs of Ray Train
        _hide_secrets()
        try:
            log(f"connect  to the Ray cluster at {address}")
            check_answers(address)
            job = JobConfig(metadata={"job_name": name} if name else {})
            ray.init(address, job_config=job, runtime_env=_source_for(address), **errors_alone)
        except (OSError, RayError, ValueError) as error:
            raise UserError(
                f"RAY_ADDRESS: no Ray cluster lets this process in at {address} ({first_line(error)}); want one that"
                " is up, or no RAY_ADDRESS, to use this machine alone"
            ) from None
        _handle_sigterm()
        return
    os.environ["PYTHONPATH"] = source_path()
    log("connect  starting Ray on this machine")
    start_local_ray(cpus, **errors_alone)
    _handle_sigterm()


def is_on_this_machine_alone() -> bool:
    """Whether no node can join the cluster, because its head listens on this machine's loopback device alone."""
    return ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")


def _source_for(address: str) -> dict[str, Any]:
    """The runtime environment by which the workers of a cluster import what this process does.

    Nodes of a cluster on loopback addresses are on this machine, and those of a submitted job have the copy of its
    working directory. To all others Ray takes the package.
    """
    host = address.rpartition("/")[2].rpartition(":")[0]
    if host == "localhost" or host.startswith("127.") or in_job_copy(Path.cwd()):
        return {"env_vars": {"PYTHONPATH": source_path()}}
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in path if Path(entry).absolute() != _SOURCE_ROOT.absolute()]
    package = str(_SOURCE_ROOT.absolute() / __name__.partition(".")[0])
    return {
        "py_modules": [package],
        "excludes": ["__pycache__"],
        "env_vars": {"PYTHONPATH": os.pathsep.join(path)},
    }


def _hide_secrets() -> None:
    """Ray shows a driver's command line in its dashboard, where its arguments may hold secrets; `ps` shows it too."""
    command = shlex.join(sys.orig_argv)
    if (shown := redact(command)) != command:
        setproctitle(shown)


def _handle_sigterm() -> None:
    """Let SIGTERM, `ray job stop`'s among them, end this process as Ctrl-C does; Ray's own handler aborts it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def source_path() -> str:
    """PYTHONPATH of the workers: this source tree, then what this process has.

    In a submitted job every node unpacks a copy of the working directory below its own temporary folder, and
    starts its workers there: the path relative to it is right on all of them.
    """
    here, root = Path.cwd(), _SOURCE_ROOT.absolute()
    relative = [str(root.relative_to(here))] if root.is_relative_to(here) else []
    return os.pathsep.join(filter(None, [str(root), *relative, os.environ.get("PYTHONPATH")]))


def in_job_copy(folder: str | Path) -> bool:
    """Whether a folder lies in the copy of a working directory that Ray makes for a job, and deletes."""
    return "working_dir_files" in Path(folder).absolute().parts
