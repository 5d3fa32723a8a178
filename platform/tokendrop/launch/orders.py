"""What a worker's training thread and the controller of its group tell each other, by calls into the process."""

import importlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a worker stands."""

    done: int
    """Steps done."""
    waits: bool
    """It waits at `done`, whose checkpoint is committed, to be told to go on or to be replaced."""
    step_time_s: float
    """Lately."""
    device: str
    """`cpu` or `cuda`."""


class Orders:
    """Of one process: the training thread reports and obeys, calls from the controller ask and order."""

    def __init__(self) -> None:
        self.standing: Standing | None = None
        self.marks: list[tuple[str, float]] = []
        """What the group went through until its training function started, each with the time at its end."""
        self._paused = False
        self._change = threading.Condition()
        self._go_on_from = -1

    def begin(self, step: int, device: str) -> None:
        self._last = (step, time.monotonic())
        self.standing = Standing(done=step, waits=False, step_time_s=0.0, device=device)

    def asked(self, step: int) -> bool:
        """Take note of the steps done; whether to pause after the next one."""
        assert self.standing is not None
        last, since = self._last
        if step > last:
            now = time.monotonic()
            took = (now - since) / (step - last)
            self._last = step, now
            before = self.standing
            smooth = 0.8 * before.step_time_s + 0.2 * took if before.step_time_s else took
            self.standing = Standing(done=step, waits=False, step_time_s=smooth, device=before.device)
        return self._paused

    def wait(self, step: int) -> None:
        """Wait at a committed step; returns when the workers are to go on as they are."""
        assert self.standing is not None
        self._paused = False
        self.standing = Standing(
            done=step, waits=True, step_time_s=self.standing.step_time_s, device=self.standing.device
        )
        with self._change:
            self._change.wait_for(lambda: self._go_on_from >= step)
        self.begin(step, self.standing.device)


ORDERS = Orders()


def import_all(*modules: str) -> None:
    """Import what a worker will need, the lazy imports of torch's optimizers included."""
    for module in modules:
        importlib.import_module(module)
    import torch

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def standing() -> Standing | None:
    """Where this process's worker stands; None before it does."""
    return ORDERS.standing


def pause() -> None:
    ORDERS._paused = True


def go_on(step: int) -> None:
    """From a step where rank 0 waits; this process may be there a little later."""
    with ORDERS._change:
        ORDERS._paused = False  # asked for while this process had begun to wait
        ORDERS._go_on_from = step
        ORDERS._change.notify_all()


def set_marks(marks: Sequence[tuple[str, float]]) -> None:
    ORDERS.marks = list(marks)
