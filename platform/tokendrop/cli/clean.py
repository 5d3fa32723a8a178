"""`tokendrop runs clean`: old runs are removed, and nothing else."""

import argparse
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokendrop.cli.arguments import path, shortened, whole
from tokendrop.cli.command import Command, Outcome
from tokendrop.errors import UserError
from tokendrop.output import count, table

if TYPE_CHECKING:
    from tokendrop.report.removal import StoredRun

_AGE = re.compile(r"([0-9]{1,6})([hdw])")
_UNITS_S = {"h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def age(text: str) -> int:
    """The type of an age, in seconds.

    Raises:
        ArgumentTypeError: it is none.
    """
    found = _AGE.fullmatch(text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"want an age such as 12h, 30d or 8w, got {shortened(text)}")
    return int(found[1]) * _UNITS_S[found[2]]


def arguments(parser: argparse.ArgumentParser) -> None:
    """FOLDER, which runs of it go, and whether they really do."""
    parser.add_argument(
        "folder", type=path, nargs="?", default=Path("runs"), help="folder of run folders (default runs)"
    )
    parser.add_argument(
        "--keep-last",
        type=whole(1),
        metavar="N",
        help="keep the N newest runs of each job name, by the last change of their files",
    )
    parser.add_argument(
        "--older", type=age, metavar="AGE", help="only runs whose files last changed so long ago: 12h, 30d, 8w"
    )
    parser.add_argument("--yes", action="store_true", help="remove them; without it they are only listed")


def run(options: argparse.Namespace) -> Outcome:
    """List the runs that are to go, or remove them; exit code 1 where one can't be removed.

    Raises:
        UserError: there is no such folder, no run in it, or nothing says which runs are to go.
    """
    from tokendrop.report.removal import outdated, remove, stored_runs

    if options.keep_last is None and options.older is None:
        raise UserError("runs clean: want --keep-last N, --older AGE or both, which say which runs go")
    now = time.time()
    runs = stored_runs(options.folder)
    left = {str(one.run): one.foreign for one in runs if one.foreign}
    among, gone, failed = len(runs) - len(left), [], False
    for one in outdated(runs, keep_last=options.keep_last or 0, older_s=options.older or 0, now=now):
        try:
            if one.in_use:
                raise UserError(one.in_use)
            if options.yes:
                remove(one)
            gone.append(one)
        except UserError as error:
            left[str(one.run)] = str(error)
        except OSError as error:
            left[str(one.run)], failed = f"it can't be removed ({error.strerror or error})", True
    result = result_of(options.folder, gone, left, among=among, is_removed=options.yes)
    return Outcome(result, text_of(result, gone, now), exit_code=1 if failed else 0)


def result_of(
    folder: Path, gone: Sequence["StoredRun"], left: dict[str, str], *, among: int, is_removed: bool
) -> dict[str, Any]:
    """What scripts read."""
    rows = [
        {
            "run": str(one.run),
            "name": one.name,
            "changed": datetime.fromtimestamp(one.changed, UTC).isoformat(timespec="seconds"),
            "bytes": one.size_bytes,
        }
        for one in gone
    ]
    return {
        "folder": str(folder),
        "removed": is_removed,
        "runs": rows,
        "bytes": sum(row["bytes"] for row in rows),
        "among": among,
        "left": [{"run": run, "why": why} for run, why in left.items()],
    }


def text_of(result: dict[str, Any], gone: Sequence["StoredRun"], now: float) -> str:
    """What people read."""
    folder = result["folder"]
    rows = [
        [str(one.run.relative_to(folder)), one.name, _ago(now - one.changed), f"{count(one.size_bytes)}B"]
        for one in gone
    ]
    parts = [table(["run", "job", "last change", "size"], rows)] if rows else []
    parts += ["\n".join(f"left     {one['run']}: {one['why']}" for one in result["left"])] if result["left"] else []
    those, size = f"{len(rows)} of {result['among']} runs in {folder}", f"{count(result['bytes'])}B"
    if not rows:
        parts.append(f"nothing to remove: no run in {folder} is old enough, of {result['among']}")
    elif result["removed"]:
        parts.append(f"removed {those}, {size}")
    else:
        parts.append(f"would remove {those}, {size}; --yes does it")
    return "\n\n".join(parts)


def _ago(seconds: float) -> str:
    days = seconds / _UNITS_S["d"]
    return f"{days:.0f} d ago" if days >= 2 else f"{max(0.0, seconds) / _UNITS_S['h']:.1f} h ago"


COMMAND = Command(
    "runs clean",
    run,
    arguments,
    about="List the old runs of a folder with their bytes, and with --yes remove them.",
    example="tokendrop runs clean runs --keep-last 3 --older 30d",
    more="With both options, only what is neither new nor among the last goes. A run that is at work or read, a damaged"
    " one, links, token shards, sweeps/ and folders that are no run folders stay.",
)
