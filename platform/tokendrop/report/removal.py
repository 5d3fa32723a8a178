"""Which runs of a folder are old enough to go, and their removal: of run folders alone, and of none that is in use."""

import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokendrop.atomic import LOCK, exclusive_lock, is_locked
from tokendrop.data.shards.format import MANIFEST, SHARDS
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.report.listing import job_tree, some_runs
from tokendrop.track.run_folder import DATA, JOB, SWEEPS
from tokendrop.train.checkpoint_index import CHECKPOINTS, kept_by_nobody
from tokendrop.train.sealed import read_sealed_text

_LAST = (JOB, DATA, LOCK)  # of a run folder: as long as they are there, a removal that was broken off can be done again
_NEVER = {MANIFEST: "token shards are in it", SHARDS: "token shards are in it", JOB: "another run folder is in it"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run folder as storage has it."""

    run: Path
    name: str
    """Of its job."""
    changed: float
    """Unix time of the last change of one of its files, its lock left out."""
    size_bytes: int
    foreign: str | None = None
    """Why it is no run folder to count with: damaged, or a link, say."""
    in_use: str | None = None
    """Why it must not be removed, whatever its age; None where it may be."""


def stored_runs(folder: Path) -> list[StoredRun]:
    """The runs of a folder, those below a folder `sweeps` left out.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    return [_stored(run, folder) for run in some_runs(folder) if SWEEPS not in run.relative_to(folder).parts]


def outdated(runs: Sequence[StoredRun], *, keep_last: int = 0, older_s: float = 0.0, now: float) -> list[StoredRun]:
    """Run folders that are not among the newest of a job's name, and whose last change is long ago.

    Args:
        keep_last: so many runs of each name are the newest, by their last change.
        older_s: a last change before this many seconds is long ago.
        now: Unix time.
    """
    of_name: dict[str, list[StoredRun]] = defaultdict(list)
    own = [run for run in runs if run.foreign is None]
    for run in sorted(own, key=lambda run: (run.changed, str(run.run)), reverse=True):
        of_name[run.name].append(run)
    newest = {run.run for group in of_name.values() for run in group[:keep_last]}
    return [run for run in own if run.run not in newest and now - run.changed >= older_s]


def remove(stored: StoredRun) -> None:
    """Remove a run folder.

    Raises:
        UserError: it may not be removed, is in use, or has changed since it was looked at.
        OSError: storage does not let go of a part; the rest of what describes the run stays.
    """
    if (reason := stored.foreign or stored.in_use) is not None:
        raise UserError(reason)
    run = stored.run
    with exclusive_lock(run, patience_s=0), kept_by_nobody(run / CHECKPOINTS):
        if _measured(run) != (stored.changed, stored.size_bytes, None):
            raise UserError("it has changed meanwhile")
        for path in sorted(run.iterdir()):
            if path.name in _LAST:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(run)


def _stored(run: Path, folder: Path) -> StoredRun:
    changed, size_bytes, within = _measured(run)
    return StoredRun(
        run=run,
        name=str(job_tree(run).get("name", run.name)),
        changed=changed,
        size_bytes=size_bytes,
        foreign=_foreign(run, folder),
        in_use="it is at work" if is_locked(run) else within,
    )


def _measured(run: Path) -> tuple[float, int, str | None]:
    """The last change of a run's files, their bytes, and what among them must not be removed."""
    changed, size_bytes, within = 0.0, 0, None
    for where, _, names in os.walk(run):
        for name in names:
            try:
                status = os.lstat(os.path.join(where, name))
            except FileNotFoundError:  # a run at work removes some of its own
                continue
            size_bytes += status.st_size
            if name != LOCK:
                changed = max(changed, status.st_mtime)
            if name in _NEVER and where != str(run):
                within = _NEVER[name]
    return changed, size_bytes, within


def _foreign(run: Path, folder: Path) -> str | None:
    """Why a folder is not to be taken for a run folder; None where it is one."""
    if run.is_symlink() or any(path.is_symlink() for path in run.parents if folder in path.parents):
        return "a link leads there"
    if not (run / DATA).is_file():
        return f"not a run folder (no {DATA} in it)"
    try:
        read_sealed_text(run / JOB)
        read_sealed_text(run / DATA)
    except DamagedDataError as error:
        return f"damaged, and so perhaps no run folder ({error})"
    return None
