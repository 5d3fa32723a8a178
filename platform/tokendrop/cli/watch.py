"""`tokendrop watch`: a run as it trains, from its folder alone."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from tokendrop.cli.arguments import add_run_folder
from tokendrop.cli.command import Command, Outcome
from tokendrop.output import log

if TYPE_CHECKING:
    from tokendrop.report.listing import RunOverview


def run(options: argparse.Namespace) -> Outcome:
    """Show a run until nobody is at work on it; exit code 1 where it is not trained to the end then.

    Raises:
        UserError: it is no run folder.
    """
    from tokendrop.launch.follow import follow
    from tokendrop.report.listing import overview

    try:
        follow(options.run_folder)
    except KeyboardInterrupt:
        log("watch    left; the run goes on as it is")
        raise
    glance = overview(options.run_folder)
    return Outcome(asdict(glance), text_of(glance), exit_code=0 if glance.state == "finished" else 1)


def text_of(glance: "RunOverview") -> str:
    """How a run ended."""
    if glance.state == "finished":
        return f"finished {glance.run}"
    goes_on = "" if glance.state == "damaged" else f"; 'tokendrop train --resume {glance.run}' goes on"
    return f"{glance.state:8} {glance.run} at step {glance.step} of {glance.steps or '?'}{goes_on}"


COMMAND = Command(
    "watch",
    run,
    add_run_folder,
    about="Show a run as it trains, also a submitted one, from any machine that sees its folder, to its end.",
    example="tokendrop watch runs/quickstart-random-ltd-20260101-120000",
    more="Ctrl-C leaves the run as it is. The exit code is 1 where the run has failed or was stopped.",
)
