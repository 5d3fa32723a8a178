"""The driver's copy of a run that a store keeps, as an actor beside the driver. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path

from tokendrop.atomic import atomic_write
from tokendrop.elastic.control import RunControl
from tokendrop.track.decisions import DECISIONS
from tokendrop.track.journal import METRICS
from tokendrop.track.run_folder import ENVIRONMENT

CHANGING = (DECISIONS, ENVIRONMENT)
"""Files that rank 0 writes and the driver reads while the run goes on."""
_CHUNK_BYTES = 2**24


class DriverCopy:
    """For rank 0 on another machine: one at a time, the last that has begun."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._rank_0: str | None = None  # nothing is known after a restart of this actor

    def begin(self, rank_0: str) -> dict[str, bytes]:
        """From now on a rank 0 of this id writes, and none before it; the files that change with the run, by name."""
        self._rank_0 = rank_0
        return {name: (self.run / name).read_bytes() for name in CHANGING if (self.run / name).exists()}

    def record(self, begin: int) -> bytes:
        """The live record from a byte on, or the first part of that; empty at its end."""
        with (self.run / METRICS).open("rb") as record:
            record.seek(begin)
            return record.read(_CHUNK_BYTES)

    def exchange(self, rank_0: str, begin: int, lines: bytes, files: Mapping[str, bytes]) -> dict[str, str]:
        """Take what rank 0 has written; what is asked of it. The same may come twice.

        Args:
            begin: bytes of the live record before these lines.
            files: those that have changed, by name.
        Raises:
            RuntimeError: others follow this rank 0 by now, or the driver has noted its loss.
        """
        self._rank_0 = self._rank_0 or rank_0
        path = self.run / METRICS
        with path.open("rb") as record:
            record.seek(begin)
            there = record.read()
        if rank_0 != self._rank_0 or not lines.startswith(there):
            raise RuntimeError(f"{path}: other workers, or their driver, have gone on with it")
        for name, content in files.items():  # before the lines, by which they are looked for
            atomic_write(self.run / name, content)
        with path.open("ab") as record:  # the driver may just be adding a line
            record.write(lines[len(there) :])
        return RunControl(self.run).told()
