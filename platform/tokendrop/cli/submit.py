"""`tokendrop submit`: a job runs on a Ray cluster, and its log is followed."""

import argparse

from tokendrop.cli.arguments import add_overrides, job_file, path
from tokendrop.cli.command import Command, Outcome


def arguments(parser: argparse.ArgumentParser) -> None:
    """JOB, and where it runs."""
    parser.add_argument("job", type=job_file, help="job file (YAML), below --working-dir")
    add_overrides(parser)
    parser.add_argument(
        "--address", help="the cluster's dashboard (default RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265)"
    )
    parser.add_argument("--working-dir", type=path, default=".", metavar="DIR", help="the folder to upload (default .)")
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="return once the job is submitted")


def run(options: argparse.Namespace) -> Outcome:
    """Submit a job; its exit code is that of this command.

    Raises:
        UserError: something is wrong that shows before anything is uploaded.
    """
    from tokendrop.launch.submit import submit

    result = submit(
        options.job,
        options.overrides,
        address=options.address,
        working_dir=str(options.working_dir),
        wait=options.wait,
        as_json=options.json,
    )
    return Outcome(result, exit_code=result["exit_code"])


COMMAND = Command(
    "submit",
    run,
    arguments,
    about="Check a job, then run it on a Ray cluster: `ray job submit` with its log and its exit code.",
    example="tokendrop submit jobs/pretrain/quickstart.yaml --address http://127.0.0.1:8265",
)
