"""Nodes that are lost at random, each as likely at any time that it is held, and replaced."""

from collections import deque
from math import ceil, inf
from random import Random
from typing import Literal

from tokendrop.schedule.device import DeviceProfile

Event = Literal["none", "lost", "came"]

_HOUR_S = 3600.0
_MOST_LOSSES = 100_000  # of one run; one that needs more makes no headway


class Nodes:
    """Nodes that are held for a run: when one is lost, when another comes, and what they cost."""

    def __init__(self, profile: DeviceProfile, random: Random) -> None:
        self._devices, self._start_s = profile.devices_per_node, profile.node_start_s or 0.0
        self._rate, self._random = profile.node_losses_per_hour / _HOUR_S, random
        self.now = self.worker_s = 0.0
        """Seconds since the start, and those of all places together."""
        self.losses = 0
        self._wanted = 0  # workers
        self._coming = deque[float]()
        self._left_s = self._draw()  # by all nodes together, until the next loss
        self._hit = 0.0

    @property
    def held(self) -> int:
        """Nodes that are there."""
        return ceil(self._wanted / self._devices) - len(self._coming)

    @property
    def places(self) -> int:
        """Workers that they hold; of a node that is wanted in part, that part."""
        return min(self._wanted, self.held * self._devices)

    def want(self, workers: int) -> None:
        """Hold nodes for so many workers: those that are new are there at once, having been asked for ahead."""
        more = ceil(workers / self._devices) - self.held
        self._wanted = workers
        while len(self._coming) > max(0, more):
            self._coming.pop()

    def let_pass(self, seconds: float) -> Event:
        """Let so much time pass, less where a node comes or is lost before.

        Raises:
            ValueError: so many nodes are lost that no run would end.
        """
        lost_s = self._left_s / held if (held := self.held) else inf
        come_s = self._coming[0] - self.now if self._coming else inf
        passed = min(seconds, come_s, lost_s)
        self.now += passed
        self.worker_s += passed * self.places
        self._left_s -= passed * held if held else 0.0
        if passed == seconds:
            return "none"
        if passed == come_s:
            self._coming.popleft()
            return "came"
        self._hit, self._left_s = self._random.random() * held, self._draw()
        self._coming.append(self.now + self._start_s)
        self.losses += 1
        if self.losses > _MOST_LOSSES:
            raise ValueError(
                f"node_losses_per_hour: a simulated run has lost {_MOST_LOSSES:,} nodes and is not done; want fewer"
                " losses, or checkpoints more often"
            )
        return "lost"

    def hits(self, workers: int) -> bool:
        """Whether the node that was just lost is one of those that so many workers are on; each is as likely."""
        return self._hit < ceil(workers / self._devices)

    def _draw(self) -> float:
        return self._random.expovariate(self._rate) if self._rate else inf
