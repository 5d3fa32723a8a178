"""What a run's driver and its scaling policy ask of its workers: a word in each of two small files of the run folder.

Rank 0 alone reads them, so that all ranks do the same; files, because every machine that shares the run folder sees
them, whatever Ray it is on. A machine that does not share it is told what is in them. Both files are always there: a
folder on network storage may hide a new one for a minute.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

CONTROL = "control"
Word = Literal["wait", "go on", "leave"]
"""What workers that wait at a committed step are to do."""
WORDS: tuple[Word, ...] = ("wait", "go on", "leave")

_POLL_S = 0.05


class RunControl:
    """The files: one that the driver writes, one that the policy writes."""

    def __init__(self, run: Path) -> None:
        self.folder = run / CONTROL
        self.compiled = self.folder / "compiled"
        """Code that workers have compiled, for those that come later."""

    def reset(self) -> None:
        """By the driver, before its first workers: forget what others were asked, and what they have compiled."""
        self.folder.mkdir(exist_ok=True)
        self.compiled.unlink(missing_ok=True)
        self._write("driver", "train")
        self.train()

    def stop(self) -> None:
        """By the driver: the workers save a checkpoint at the next step, and end."""
        self._write("driver", "stop")

    @property
    def is_stopped(self) -> bool:
        """Whether the driver has asked for the end."""
        return self._read("driver") == "stop"

    def train(self, timings: Sequence[tuple[str, float]] = ()) -> None:
        """By the policy: the next group of workers is to train.

        Args:
            timings: what that group went through until now, in order, each with the time at its end.
        """
        self._write("timings", json.dumps(list(timings)))
        self._write("policy", "train")

    def pause(self) -> None:
        """By the policy: the workers save a checkpoint at the next step, and wait."""
        self._write("policy", "pause")

    def go_on(self, step: int) -> None:
        """By the policy: those that wait at `step` train on as they are."""
        self._write("policy", f"go on {step}")

    @property
    def pauses(self) -> bool:
        """Whether the policy has asked for a pause."""
        return self._read("policy") == "pause"

    def goes_on(self, step: int) -> bool:
        """Whether the policy lets those that wait at `step` train on as they are."""
        return self._read("policy") == f"go on {step}"

    @property
    def timings(self) -> list[tuple[str, float]]:
        """What the policy has told of this group's start: names, each with the time at its end."""
        return [(name, end) for name, end in json.loads(self._read("timings") or "[]")]

    def told(self) -> dict[str, str]:
        """All that is asked just now: for workers on a machine that does not see these files."""
        return {name: self._read(name) for name in ("policy", "driver", "timings")}  # the last is written first

    def tell(self, told: dict[str, str]) -> None:
        """Ask the same here."""
        self.folder.mkdir(exist_ok=True)
        for name in reversed(told):
            if told[name] != self._read(name):
                self._write(name, told[name])

    def _write(self, name: str, text: str) -> None:
        partial = self.folder / f".{name}"
        partial.write_text(text)
        partial.rename(self.folder / name)

    def _read(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / name).read_text()
        return ""


class WorkerControl:
    """A worker's side of it."""

    def __init__(
        self, control: RunControl, *, rank: int, agree: Callable[[int], int], must_save: Callable[[], bool]
    ) -> None:
        """
        Args:
            agree: called by all ranks at once; returns on all of them what rank 0 gave.
            must_save: called by rank 0 after each step; whether a checkpoint is due.
        """
        self.control, self.rank, self.agree, self.must_save = control, rank, agree, must_save
        self._saves = False

    def pause_requested(self, step: int) -> bool:
        """Whether the workers are to pause soon after this step; rank 0 alone is asked."""
        if self.rank != 0:
            return False
        self._saves = self.must_save() or self._saves
        return self._saves or self.control.pauses or self.control.is_stopped

    def next(self, step: int, *, waits: bool, is_edge: bool = False) -> bool:
        """At a committed step: whether to train on.

        Args:
            waits: for the policy to say so; else the workers train on after a checkpoint that was due, and end
                when the run is stopped.
            is_edge: whether other workers are planned from here on; then these leave, whatever was due.
        """
        while (word := WORDS[self.agree(WORDS.index(self._word(step, waits=waits, is_edge=is_edge)))]) == "wait":
            time.sleep(_POLL_S)
        self._saves = False
        return word == "go on"

    def _word(self, step: int, *, waits: bool, is_edge: bool) -> Word:
        if self.rank != 0:
            return "wait"  # for what rank 0 says
        if self.control.is_stopped:
            return "leave"
        if waits:
            return "go on" if self.control.goes_on(step) else "wait"
        return "go on" if self._saves and not is_edge else "leave"
