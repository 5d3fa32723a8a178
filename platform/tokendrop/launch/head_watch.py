"""The head of the cluster, watched: a run can't go on without it, and Ray would tell so late and at length."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import ray

from tokendrop.errors import first_line
from tokendrop.launch.cluster import is_on_this_machine_alone
from tokendrop.output import log

_POLL_S, _CONNECT_S = 1.0, 10.0
# a head of a cluster may be started again; Ray itself gives up after a minute
_LOST_ALONE_S, _LOST_S = 3.0, 45.0
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_RAY_WAITS = "RAY_gcs_rpc_server_reconnect_timeout_s"  # a setting of Ray's for heads that come back


class HeadWatch:
    """While its block runs, ends this process with exit code 1 when the head is gone."""

    def __init__(self) -> None:
        self.what_now = "what is prepared stays; the same command goes on with it"
        """The end of the sentence that says so."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called before the process ends; it must not wait for the cluster."""
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self.address = host.strip("[]"), int(port)
        waits_s = float(os.environ.get(_RAY_WAITS, 0))
        self._patience_s = _LOST_ALONE_S if is_on_this_machine_alone() else max(_LOST_S, waits_s)
        self._done = threading.Event()

    def __enter__(self) -> "HeadWatch":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._done.set()

    def _watch(self) -> None:
        was_reached = False  # a head that this machine never reaches, behind a proxy say, is not watched
        failing_since: float | None = None
        while not self._done.wait(_POLL_S):
            try:
                socket.create_connection(self.address, timeout=_CONNECT_S).close()
                was_reached, failing_since = True, None
            except OSError as error:
                if not isinstance(error, ConnectionError | TimeoutError) and error.errno not in _UNREACHABLE:
                    failing_since = None  # it is of this process
                    continue
                now = time.monotonic()
                if was_reached and failing_since is not None and now - failing_since > self._patience_s:
                    self._exit(error)
                failing_since = now if failing_since is None else failing_since

    def _exit(self, error: OSError) -> None:
        address = ":".join(map(str, self.address))
        log(f"tokendrop: the Ray head at {address} is gone ({first_line(error)}); {self.what_now}")
        self.before_exit()
        os._exit(1)  # whatever waits for Ray would go on waiting
