"""A run that a store keeps, as its driver goes about it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import is_uri
from tokendrop.errors import UserError
from tokendrop.track.run_copy import catch_up, refresh
from tokendrop.track.run_home import RunHome, home_of
from tokendrop.track.run_store import check_writable, split_address

_HURRY_S = 3.0  # for a store, where a run has failed or was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the workers of a run that a store keeps are told of it."""

    address: str
    driver: str
    """The id of the driver that has started them."""
    copy: Any = None
    """An actor beside the driver, by which rank 0 reaches the driver's copy of the run."""


def check_store(config: ExperimentConfig, resume: Path | None) -> None:
    """Check that the store that is to keep a run takes files, before anything is begun for it.

    Args:
        resume: the folder of the run that goes on; None for a new one.
    Raises:
        UserError: it does not.
    """
    home = home_of(resume) if resume else None
    if config.evaluate.tasks and (home or (resume is None and is_uri(config.runs_folder))):
        raise UserError(
            "evaluate.tasks: a run that a store keeps is evaluated once it is trained, by 'tokendrop evaluate ADDRESS';"
            " want evaluate.tasks=[]"
        )
    if home is not None:
        check_writable(split_address(home.address)[0])
    elif resume is None and is_uri(config.runs_folder):
        check_writable(config.runs_folder)


@contextmanager
def kept_in_store(run: Path) -> Iterator[RunHome | None]:
    """While the block runs, this process is the driver of a run that a store keeps; None for one in a folder alone.

    Its folder, which this process has locked, is first made what the store has. What has come to the run's record is
    written there at the end; where the block fails, if that can be done soon.
    """
    home = home_of(run)
    if home is None:
        yield None
        return
    refresh(home)
    try:
        yield home
    except BaseException:
        home.store.patience_s = _HURRY_S
        with suppress(Exception):
            home.end()
        raise
    home.end()
    catch_up(home)
