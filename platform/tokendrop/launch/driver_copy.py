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


class DriverCopy:
    """For rank 0 on another machine."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def begin(self) -> tuple[bytes, dict[str, bytes]]:
        """The live record so far, and the files that change with it, by name."""
        files = {name: (self.run / name).read_bytes() for name in CHANGING if (self.run / name).exists()}
        return (self.run / METRICS).read_bytes(), files

    def exchange(self, begin: int, lines: bytes, files: Mapping[str, bytes]) -> dict[str, str]:
        """Take what rank 0 has written; what is asked of it. The same may come twice.

        Args:
            begin: bytes of the live record before these lines.
            files: those that have changed, by name.
        Raises:
            RuntimeError: the record has gone on without this rank 0, which others follow by now.
        """
        if lines:
            with (self.run / METRICS).open("r+b") as record:
                record.seek(begin)
                there = record.read()
                if not lines.startswith(there):
                    raise RuntimeError(f"{self.run / METRICS}: other workers, or their driver, have gone on with it")
                record.write(lines[len(there) :])
        for name, content in files.items():
            atomic_write(self.run / name, content)
        return RunControl(self.run).told()
