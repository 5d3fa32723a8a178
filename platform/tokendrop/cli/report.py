"""`tokendrop report`: a page of charts from run folders."""

import argparse
from pathlib import Path

from tokendrop.cli.arguments import path, run_here, run_place
from tokendrop.cli.command import Command, Outcome
from tokendrop.errors import UserError

_PAGE = "report.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Runs, and what is made of them."""
    help = "run folder, a folder of them, or the folder of a sweep"
    parser.add_argument("runs", type=run_place, nargs="+", metavar="RUN", help=help)
    parser.add_argument("--to", type=path, metavar="FILE", help=f"where it is written (default {_PAGE}, or NAME.svg)")
    parser.add_argument(
        "--figure",
        metavar="NAME",
        help="only this chart, as .svg or .png; the page has their names, such as loss-steps",
    )


def run(options: argparse.Namespace) -> Outcome:
    """Write a page, or one chart of it.

    Raises:
        UserError: there is no run to be drawn, or the file can't be written.
    """
    from tokendrop.atomic import atomic_write
    from tokendrop.report.arms import arms_of
    from tokendrop.report.charts import FIGURES
    from tokendrop.report.curves import datasets
    from tokendrop.report.figure import FORMATS, write_figure
    from tokendrop.report.page import page_text
    from tokendrop.report.record import read_runs

    to: Path = options.to or Path(f"{options.figure}.svg" if options.figure else _PAGE)
    if options.figure is not None and options.figure not in (names := [figure.name for figure in FIGURES]):
        raise UserError(f"--figure: want one of {', '.join(names)}, got {options.figure[:40]!r}")
    wanted = FORMATS if options.figure else (".html", ".htm")
    if to.suffix not in wanted:
        raise UserError(f"--to: want a file that ends in {' or '.join(wanted)}, got {to}")
    if not to.absolute().parent.is_dir():
        raise UserError(f"--to: {to.parent} is no folder; want a file in one that is there")
    records, left_out = read_runs([run_here(run, checkpoint=False) for run in options.runs])
    arms = arms_of(records)
    data = datasets(arms)
    try:
        if options.figure:
            write_figure(options.figure, [arm.label for arm in arms], data, to)
        else:
            atomic_write(to, page_text(arms, data, notes=left_out).encode())
    except OSError as error:
        raise UserError(f"--to: {to} can't be written ({error.strerror or error})") from None
    result = {
        "file": str(to),
        "bytes": to.stat().st_size,
        "runs": [str(record.folder) for record in records],
        "arms": [arm.label for arm in arms],
        "notes": [*left_out, *(note for record in records for note in record.notes())],
    }
    told = f"{to}: {len(records)} run{'s' * (len(records) != 1)}, {result['bytes'] / 1e6:.2f} MB"
    return Outcome(result, "\n".join([*(f"note     {note}" for note in result["notes"]), told]))


COMMAND = Command(
    "report",
    run,
    arguments,
    about="Write one page of charts: losses over steps, layer tokens, FLOPs and time, schedules, savings.",
    example="tokendrop report runs --to report.html",
    more="Runs that differ in their seeds alone are one arm. The page needs no network.",
    extra="report",
)
