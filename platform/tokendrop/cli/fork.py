"""`tokendrop fork`: a new run from a checkpoint of another one, with changed keys from there on."""

import argparse

from tokendrop.cli.arguments import add_overrides, add_run_folder, whole
from tokendrop.cli.command import Command, Outcome
from tokendrop.cli.train import run_text, trained, where_to_look
from tokendrop.output import log


def arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, the step, and what changes there."""
    add_run_folder(parser)
    help = "step of the checkpoint to begin with, one of those that RUN keeps (checkpoint.keep)"
    parser.add_argument("--at", type=whole(1), metavar="STEP", required=True, help=help)
    add_overrides(parser)


def run(options: argparse.Namespace) -> Outcome:
    """Fork a run, and train the fork to its end.

    Raises:
        UserError: there is no such checkpoint, a key can't change there, or something is wrong with the job.
    """
    from tokendrop.launch.fork import begun_fork

    parent = options.run_folder
    with begun_fork(parent, options.at, options.overrides) as (config, folder):
        log(f"fork     {folder}, from step {options.at:,} of {parent}")
        result = trained(config, resume=folder)
    result |= {"forked_from": str(parent.absolute()), "forked_at": options.at}
    return Outcome(result, "\n".join([run_text(result, config.name), where_to_look([result], config)]))


COMMAND = Command(
    "fork",
    run,
    arguments,
    about="Start a new run from a checkpoint of another one, with some keys of its job changed from there on.",
    example="tokendrop fork runs/quickstart-random-ltd-20260101-120000 --at 1080 train.peak_lr=1e-3",
    more="RUN is not written to, and may be training. The model, the task, the optimizer and what decides on the order"
    " of samples stay. With run=NAME the same command goes on with the fork; so does tokendrop train --resume.",
)
