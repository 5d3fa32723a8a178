"""The nodes that a cluster holds while a run is at work: what its owner is billed for."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tokendrop.launch.local_nodes import count_nodes

_EVERY_S = 0.5
_GONE_S = 120.0  # for the last node to go, far more than a local cluster takes


class Held(NamedTuple):
    """A cluster's nodes at a moment, its head left out."""

    time: float
    there: int
    """At work or idle."""
    coming: int
    """Asked for, and not there yet."""


def node_seconds(looks: Sequence[Held]) -> float:
    """Nodes that are there or coming, times the seconds until the next look."""
    return sum((one.there + one.coming) * (two.time - one.time) for one, two in pairwise(looks))


def node_start_s(looks: Sequence[Held]) -> float:
    """Seconds from the first look at which a node is coming to the first at which one is there; 0 where none came."""
    asked = next((look.time for look in looks if look.coming), None)
    came = next((look.time for look in looks if look.there), None)
    return max(0.0, came - asked) if asked is not None and came is not None else 0.0


@dataclass(slots=True)
class NodeMeter:
    """Looks at a cluster twice a second, from when a run is started until its last node has gone."""

    look: Callable[[], Held]
    looks: list[Held] = field(default_factory=list[Held])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look while what is inside goes on, and until all nodes have gone."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield
            self._until_none_is_left()
        finally:
            done.set()
            thread.join()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            self.looks.append(self.look())

    def _until_none_is_left(self) -> None:
        ended = time.monotonic()
        while time.monotonic() < ended + _GONE_S:
            if self.looks and self.looks[-1].time > ended and not any(self.looks[-1][1:]):
                return
            time.sleep(_EVERY_S)


def held_now(nodes: Path) -> Held:
    """By the folders of a local cluster's nodes: to ask its autoscaler would take a core from what is measured."""
    there, coming = count_nodes(nodes)
    return Held(time=time.monotonic(), there=there, coming=coming)
