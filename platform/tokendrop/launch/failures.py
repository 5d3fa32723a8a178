"""What a lost or failing worker means for its run; Ray Train's controller imports this, and nothing of the driver."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.exceptions import RayActorError

from tokendrop.errors import UserError, first_line
from tokendrop.track.journal import note_loss


class FailFastOnUserError(ray.train.UserCallback):
    """Ends the run where a worker met what the user has to mend; else writes why workers were lost into its record."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, UserError):
                raise error
        note_loss(self.run, cause_of(worker_exceptions))


def cause_of(failures: Mapping[int, Exception]) -> str:
    """The failure that made the others: a dead worker's peers fail too, because it does not answer them."""
    rank = next((rank for rank, error in failures.items() if isinstance(error, RayActorError)), min(failures))
    return f"rank {rank} ({first_line(failures[rank])})"
