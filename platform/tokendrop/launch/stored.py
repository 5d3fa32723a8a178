"""A run that a store keeps, as its driver and its workers go about it."""

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import is_uri
from tokendrop.errors import UserError
from tokendrop.track.run_copy import refresh
from tokendrop.track.run_home import RunHome, home_of
from tokendrop.track.run_store import check_writable, split_address

SEEN_WITHIN_S = 10.0
"""So long what one machine writes to shared storage may take to be seen by the others."""
_HURRY_S = 3.0  # for a store, where a run has failed or was stopped


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


def home_of_worker(run: Path, driver: str | None) -> RunHome | None:
    """A worker's side of it.

    Args:
        driver: the id of the driver that has started it; None where no store keeps the run.
    Raises:
        UserError: this machine does not see the run folder of its driver.
    """
    if driver is None:
        return None
    deadline = time.monotonic() + SEEN_WITHIN_S
    while (home := home_of(run)) is None or home.driver != driver:
        if time.monotonic() < deadline:
            time.sleep(0.2)
            continue
        raise UserError(
            f"runs_folder: a worker on {platform.node()} does not see {run}, the copy of the run on its driver's"
            " machine; want all workers on that machine, or TOKENDROP_STORED_RUNS on a disk that all machines share"
        )
    return home
