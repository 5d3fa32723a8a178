"""`tokendrop export`: a run's model in the format of Hugging Face."""

import argparse

from tokendrop.cli.arguments import path, run_here, run_place
from tokendrop.cli.command import Command, Outcome


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is exported, and to where."""
    parser.add_argument("path", type=run_place, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--to", type=path, required=True, metavar="DIR", help="a new folder")


def run(options: argparse.Namespace) -> Outcome:
    """Write the folder.

    Raises:
        UserError: there is no checkpoint, or --to is no new folder.
    """
    from tokendrop.evaluate.export import export_checkpoint

    to, call = export_checkpoint(run_here(options.path), options.to)
    return Outcome({"folder": str(to)}, f"{to}: read it by {call}")


COMMAND = Command(
    "export",
    run,
    arguments,
    about="Write the model of a run or a checkpoint as a Hugging Face folder with the same logits.",
    example="tokendrop export runs/gpt --to gpt-hf",
    extra="eval",
)
