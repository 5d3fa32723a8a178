"""Notices that nodes of a run will go, as its workers hear of them."""

import threading
import time
from contextlib import suppress

import ray.train
from ray.exceptions import RayError

_EVERY_S = 1.0


class DrainNotice:
    """Whether a node of this run has been told to go since this was last asked.

    Ray goes on with the workers there until the node's deadline, and restarts the run without it. Before 2.58, it
    tells nobody. To ask Ray is a barrier of all ranks, so each rank asks from a thread of its own: steps don't wait.
    """

    def __init__(self) -> None:
        """By all ranks, as workers of Ray Train."""
        self._has_come = threading.Event()
        if hasattr(ray.train, "get_preemption_info"):
            threading.Thread(target=self._watch, daemon=True, name="drain-notice").start()

    def __call__(self) -> bool:
        has_come = self._has_come.is_set()
        if has_come:
            self._has_come.clear()
        return has_come

    def _watch(self) -> None:
        known: set[str] = set()
        with suppress(RayError):  # the workers are being ended
            while True:
                notice = ray.train.get_preemption_info()
                nodes = set(notice.preempted_node_ids if notice else ())
                if nodes - known:
                    known |= nodes
                    self._has_come.set()
                time.sleep(_EVERY_S)
