"""A Ray cluster on this machine that grows and shrinks by itself, for trying things: start, find and stop it.

One file in a folder of the user's tells of it. All its processes are found by their mark, and no other Ray is touched.
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from tokendrop.errors import UserError
from tokendrop.launch.local_head import (
    HOST,
    MARK,
    ClusterError,
    ClusterSize,
    LocalCluster,
    describe,
    free_port,
    start_head,
)
from tokendrop.launch.local_nodes import ENDED, node_address
from tokendrop.output import log

_PORT, _DASHBOARD_PORT = 6399, 8265  # where these are free; `submit` tries that dashboard when it is given none
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _POLL_S = 300.0, 5.0, 0.2
_STARTS, _MISSED = 3, "timed out during startup"  # what Ray's head says where it misses a deadline of its own
_KILL_TIMEOUT_S = 20.0  # a killed process ends at once, but for one in a system call that can't be interrupted


def start(size: ClusterSize, *, port: int | None = None) -> LocalCluster:
    """Start a cluster; returns once its dashboard answers and its first nodes are there.

    Raises:
        UserError: one is up already, or `port` is in use.
        ClusterError: it did not start; nothing of it is left.
    """
    with _state_folder() as folder, _terminable():
        before = _read_state(folder)
        if before and processes(before):
            raise UserError(f"a local cluster is up already at {before.address}; 'tokendrop cluster down' stops it")
        left = _STARTS
        while True:
            try:
                return _started(_new_cluster(size, folder, port), folder)
            except ClusterError as error:
                left -= 1
                if _MISSED not in str(error) or error.__cause__ or not left:  # or something of it is left
                    raise
                log("cluster  Ray's head missed a deadline of its own, as on a busy machine; it is started again")


def _started(cluster: LocalCluster, folder: Path) -> LocalCluster:
    shutil.rmtree(cluster.folder, ignore_errors=True)
    _write_state(folder, cluster)  # before anything runs: `down` finds it, whatever becomes of this process
    try:
        _wait_until_ready(cluster, start_head(cluster))
    except BaseException as error:
        try:
            _stop(cluster, folder)
        except ClusterError as left:
            raise ClusterError(f"{error}\n{left}") from error
        raise
    return cluster


def find() -> LocalCluster | None:
    """The local cluster of this user on this machine, where one is up."""
    with _state_folder(lock=False) as folder:
        cluster = _read_state(folder)
        return cluster if cluster and processes(cluster) else None


def stop() -> LocalCluster | None:
    """Stop the cluster with all that runs on it, and remove its files; returns it, where one was up.

    Raises:
        ClusterError: a process of it does not end, even when killed; its files stay, and another call goes on.
    """
    with _state_folder() as folder:
        cluster = _read_state(folder)
        if cluster is None:
            return None
        was_up = bool(processes(cluster))
        _stop(cluster, folder)
        return cluster if was_up else None


def processes(cluster: LocalCluster) -> list[psutil.Process]:
    """All processes of a cluster: the head, every node, what runs on them, submitted jobs."""
    marked: list[psutil.Process] = []
    sessions: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended by now, or is somebody else's
            if not _is_alive(process):
                continue
            sessions[process] = os.getsid(process.pid)
            if process.environ().get(MARK) == cluster.mark:
                marked.append(process)
    # Ray's agents write their name over their environment; a session that the head or a job began is all ours
    ours = {sessions[process] for process in marked} - {os.getsid(0)}
    return [process for process, session in sessions.items() if process in marked or session in ours]


def _new_cluster(size: ClusterSize, folder: Path, port: int | None) -> LocalCluster:
    if port is not None and not (0 < port < 65536 and free_port(port) == port):
        raise UserError(f"--port {port}: want a port from 1 to 65,535 that is free")
    home = folder / "ray"
    return LocalCluster(
        mark=secrets.token_hex(8),
        address=f"{node_address(0)}:{port or free_port(_PORT)}",
        dashboard=f"http://{HOST}:{free_port(_DASHBOARD_PORT)}",
        folder=str(home),
        access={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / "token")},
        size=size,
    )


def _wait_until_ready(cluster: LocalCluster, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _is_ready(cluster):
        if head.poll() is not None or time.monotonic() > deadline:
            ended = Path(cluster.folder) / "nodes" / ENDED
            said = (ended if ended.exists() else cluster.log).read_text(errors="replace").strip()[-2000:]
            raise ClusterError(f"{said}\nthe local cluster did not start")
        time.sleep(_POLL_S)


def _is_ready(cluster: LocalCluster) -> bool:
    try:
        urllib.request.urlopen(f"{cluster.dashboard}/api/version", timeout=5).close()
    except urllib.error.HTTPError:
        pass  # it wants a token: it is there
    except OSError:
        return False
    try:
        known = describe(cluster)
    except ClusterError:
        return False
    # the autoscaler is a second behind: a node may be there and pending too
    return len(known["nodes"]) > cluster.size.min_nodes and not known["pending"]


def _stop(cluster: LocalCluster, folder: Path) -> None:
    left = processes(cluster)
    _end(left, psutil.Process.terminate, _STOP_TIMEOUT_S)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while left := list({*filter(_is_alive, left), *processes(cluster)}):  # with what they have started since
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the local cluster at {cluster.address} is not down: killed, but not ended: {_names(left)};"
                " 'tokendrop cluster down' tries again"
            )
        _end(left, psutil.Process.kill, 1.0)
    shutil.rmtree(cluster.folder, ignore_errors=True)
    _state_file(folder).unlink(missing_ok=True)


def _end(left: list[psutil.Process], end: Callable[[psutil.Process], None], patience_s: float) -> None:
    for process in left:
        with suppress(psutil.Error):
            end(process)
    deadline = time.monotonic() + patience_s
    time.sleep(_POLL_S)  # also for what they have just started to show
    while any(map(_is_alive, left)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _names(left: list[psutil.Process]) -> str:
    """Processes as a user finds them: by id, name and state."""
    names: list[str] = []
    for process in left:
        with suppress(psutil.Error):
            names.append(f"process {process.pid} ({process.name()}, {process.status()})")
    return ", ".join(names) or f"{len(left)} processes that start others"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def _state_folder(*, lock: bool = True) -> Iterator[Path]:
    """This user's folder for a cluster on this machine; one process at a time may start or stop it."""
    # a short path, for the sockets in it; not below the home folder, which machines may share
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / f"tokendrop-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise UserError(f"{folder}: it belongs to somebody else; set RAY_TMPDIR to a folder of your own")
    folder.chmod(0o700)
    opened = os.open(folder, os.O_RDONLY)
    try:
        if lock:
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(opened)


def _state_file(folder: Path) -> Path:
    return folder / "cluster.json"


def _write_state(folder: Path, cluster: LocalCluster) -> None:
    partial = folder / "partial.json"
    partial.write_text(json.dumps(asdict(cluster), indent=1))
    partial.rename(_state_file(folder))


def _read_state(folder: Path) -> LocalCluster | None:
    try:
        state = json.loads(_state_file(folder).read_text())
        return LocalCluster(**{**state, "size": ClusterSize(**state["size"])})
    except (OSError, ValueError, TypeError, KeyError):  # none, or one that this version did not write
        return None


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does, by an exception."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
