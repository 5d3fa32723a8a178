"""Where a group of workers stands, by the live record that its rank 0 writes."""

from pathlib import Path

from tokendrop.track.journal import MetricsTail

_SMOOTH = 0.8


class Progress:
    """Of the group that runs; nothing is known of one that has not begun to train."""

    def __init__(self, run: Path) -> None:
        self._tail = MetricsTail(run)
        self._tail.skip()
        self.forget()

    def forget(self) -> None:
        """Of what comes next in the record, only a new group's lines count."""
        self.is_known = False
        self.done = 0
        self.waits = False
        """The group waits at `done`, whose checkpoint is committed."""
        self.step_time_s = 0.0
        """Lately; 0 where it is not known."""

    def went_on(self) -> None:
        """The group was told to train on from where it waits."""
        self.waits = False

    def update(self) -> None:
        """Take in what is new."""
        for line in self._tail.read():
            if "attempt_from" in line:
                self.forget()
                self.is_known, self.done = True, line["attempt_from"]
            elif "paused_at" in line:
                self.done, self.waits = line["paused_at"], True
            elif "step" in line:
                took, before = line["step_time_s"], self.step_time_s
                self.step_time_s = _SMOOTH * before + (1 - _SMOOTH) * took if before else took
                self.done = line["step"]
