"""`tokendrop import`: configs of other frameworks as jobs."""

import argparse
from pathlib import Path

from tokendrop.cli.arguments import path
from tokendrop.cli.command import Command, Group, Outcome
from tokendrop.errors import UserError
from tokendrop.output import log


def arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG, the model, and where the job goes."""
    parser.add_argument("config", type=path, metavar="CONFIG", help="DeepSpeed config (JSON) with random_ltd")
    help = "preset of the model, such as gpt3-1.3b; a DeepSpeed config says no more of it than its layers"
    parser.add_argument("--model", metavar="PRESET", help=help)
    parser.add_argument("--output", type=path, metavar="JOB", help="a new .yaml file; on standard output when left out")


def run(options: argparse.Namespace) -> Outcome:
    """Write a job from a DeepSpeed config.

    Raises:
        UserError: it has no random-LTD, or what can't be left out has no counterpart; or --output is no new file.
    """
    from tokendrop.config.deepspeed import job_of

    to: Path | None = options.output
    if to is not None and (to.suffix not in (".yaml", ".yml") or to.exists() or not to.absolute().parent.is_dir()):
        raise UserError(f"--output: want a new .yaml file in a folder that exists, got {to}")
    job, notes = job_of(options.config, preset=options.model)
    result = {"file": to and str(to), "job": job, "notes": notes}
    if to is None:
        return Outcome(result, job.rstrip("\n"))
    try:
        to.write_text(job, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: {to} can't be written ({error.strerror or error})") from None
    for note in notes:
        log(f"note     {note}")
    return Outcome(result, f"{to}   next: tokendrop plan {to}")


GROUP = Group(
    "import",
    "Jobs from configs of other frameworks.",
    (
        Command(
            "import deepspeed",
            run,
            arguments,
            about="Write a job with the kept lengths of a DeepSpeed config's random_ltd, step by step.",
            example="tokendrop import deepspeed ds_config.json --model gpt3-1.3b --output job.yaml",
            more="What has no counterpart, or is not in such a config, is told in a line each, also in the job.",
        ),
    ),
)
