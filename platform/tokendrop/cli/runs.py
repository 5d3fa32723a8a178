"""`tokendrop runs`: what runs there are, what one of them is, how two differ, and which are old."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokendrop.cli import clean
from tokendrop.cli.arguments import add_run, path, run_here, run_place
from tokendrop.cli.command import Command, Group, Outcome
from tokendrop.output import table

_DEFAULT = Path("runs")
_RESULTS = ("steps", "val_loss", "layer_tokens", "layer_token_saving", "flops", "wall_clock_s", "tokens_per_s")


def list_arguments(parser: argparse.ArgumentParser) -> None:
    """FOLDER, and conditions."""
    help = "folder of run folders, or its address (default runs)"
    parser.add_argument("folder", type=run_place, nargs="?", default=_DEFAULT, help=help)
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs that meet it, such as drop.method=random_ltd, val_loss<3 or state!=finished; more than one may"
        " be given",
    )


def list_runs(options: argparse.Namespace) -> Outcome:
    """List runs.

    Raises:
        UserError: there is no such folder, no run in it, or a condition is wrong.
    """
    from tokendrop.report.listing import job_tree, overview, some_runs
    from tokendrop.report.where import check_keys, parse_condition

    conditions = [parse_condition(text) for text in options.where]
    folders = some_runs(run_here(options.folder, checkpoint=False))
    runs = [overview(folder) for folder in folders]
    if conditions:
        jobs = [job_tree(folder) for folder in folders]
        check_keys(conditions, jobs)
        met = [all(one.holds(run, job) for one in conditions) for run, job in zip(runs, jobs, strict=True)]
        runs = [run for run, holds in zip(runs, met, strict=True) if holds]
    rows = [asdict(run) for run in runs]
    return Outcome({"runs": rows}, list_text(rows) if rows else f"no run like that in {options.folder}")


def list_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line a run."""
    header = ["run", "state", "step", "loss", "val loss", "layer tokens saved", "hours"]
    has_forks = any(run["forked_from"] for run in runs)
    rows = [
        [
            Path(run["run"]).name,
            run["state"],
            f"{run['step']}/{'?' if run['steps'] is None else run['steps']}",
            _shown(run["loss"], ".3f"),
            _shown(run["val_loss"], ".3f"),
            _shown(run["layer_token_saving"], ".1%"),
            _shown(run["hours"], ".2f"),
            *([_origin(run)] if has_forks else []),
        ]
        for run in runs
    ]
    return table([*header, *(["forked from"] if has_forks else [])], rows)


def _origin(run: Mapping[str, Any]) -> str:
    return f"{Path(run['forked_from']).name}, step {run['forked_at']:,}" if run["forked_from"] else ""


def _shown(value: float | None, how: str) -> str:
    return "-" if value is None else f"{value:{how}}"


def show(options: argparse.Namespace) -> Outcome:
    """Show a run: how far it came, what it came to, its job.

    Raises:
        UserError: it is no run folder.
    """
    from tokendrop.report.listing import job_tree, overview
    from tokendrop.track.lineage import read_lineage
    from tokendrop.track.run_folder import open_run_folder

    run = run_here(options.run_folder, checkpoint=False)
    open_run_folder(run)
    glance, results, job, lineage = asdict(overview(run)), _results(run), job_tree(run), read_lineage(run)
    changed = dict(lineage.changed) if lineage else {}
    at_the_fork = {key: f"{was}, and {now} from there on" for key, (was, now) in changed.items()}
    text = "\n\n".join(
        [
            list_text([glance]),
            *([_lines(at_the_fork)] if at_the_fork else []),
            _lines({key: value for key, value in results.items() if key not in ("run", "step_time_s")}),
            _lines(job),
        ]
    )
    return Outcome({**glance, "changed": changed, "results": results, "job": job}, text)


def _lines(values: Mapping[str, Any]) -> str:
    width = max(map(len, values), default=0)
    return "\n".join(f"{key:{width}}  {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _results(run: Path) -> dict[str, Any]:
    """What a run came to; nothing before its first checkpoint."""
    from tokendrop.track.journal import STEPS
    from tokendrop.track.run_folder import summarize

    return summarize(run) if any((run / STEPS).glob("*.parquet")) else {}


def diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Two runs."""
    parser.add_argument("first", type=path, metavar="A", help="run folder")
    parser.add_argument("second", type=path, metavar="B", help="another one")


def diff(options: argparse.Namespace) -> Outcome:
    """Show the keys of the jobs of two runs that differ, and what the runs came to.

    Raises:
        UserError: one of them is no run folder.
    """
    from tokendrop.report.listing import job_tree
    from tokendrop.track.run_folder import open_run_folder

    runs = [options.first, options.second]
    for run in runs:
        open_run_folder(run)
    one, other = map(job_tree, runs)
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
    results = [_results(run) for run in runs]
    came_to = [key for key in _RESULTS if any(key in result for result in results)]
    found = {
        "runs": [str(run) for run in runs],
        "keys": {key: [one.get(key), other.get(key)] for key in keys},
        "results": {key: [result.get(key) for result in results] for key in came_to},
    }
    header, names = ["", *(run.name for run in runs)], ("keys", "results")
    rows = [[key, *map(_text, pair)] for name in names for key, pair in found[name].items()]
    told = "" if keys else "\n\nThe jobs of both are the same."
    return Outcome(found, table(header, rows) + told)


GROUP = Group(
    "runs",
    "What runs there are, what one is, how two differ, which go; `tokendrop runs FOLDER` lists.",
    (
        Command(
            "runs list",
            list_runs,
            list_arguments,
            about="List runs: state, step, losses, layer tokens saved, hours from the first line of a record on.",
            example='tokendrop runs list runs --where drop.method=random_ltd --where "val_loss<4"',
        ),
        Command(
            "runs show",
            show,
            add_run,
            about="Show a run: how far it came, what it came to, every key of its job.",
            example="tokendrop runs show runs/quickstart-random-ltd-20260101-120000",
        ),
        Command(
            "runs diff",
            diff,
            diff_arguments,
            about="Show the keys of two runs' jobs that differ, and what the runs came to.",
            example="tokendrop runs diff runs/quickstart-baseline-20260101-120000 "
            "runs/quickstart-random-ltd-20260101-120100",
        ),
        clean.COMMAND,
    ),
    default="list",
)
