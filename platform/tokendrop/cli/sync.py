"""`tokendrop sync`: MLflow catches up with a run folder."""

import argparse

from tokendrop.cli.arguments import add_run_folder
from tokendrop.cli.command import Command, Outcome, fail
from tokendrop.errors import UserError


def run(options: argparse.Namespace) -> Outcome:
    """Send what MLflow lacks; exit code 1 where its server can't be reached.

    Raises:
        UserError: it is no run folder, or that of a run that is not tracked.
    """
    from tokendrop.track.mlflow import MlflowMirror
    from tokendrop.track.run_folder import open_run_folder

    config, _ = open_run_folder(options.run_folder)
    if config.track.uri is None:
        raise UserError(f"{options.run_folder}: this run is not tracked (track.uri is null)")
    mirror = MlflowMirror(options.run_folder, config)
    try:
        mirror.sync()
    except UserError:
        raise
    except Exception as error:  # MLflow's clients raise whatever their transport does
        fail(f"{config.track.uri} can't be reached ({error})")
    text = f"MLflow run {mirror.run_id} at {config.track.uri} has everything"
    return Outcome({"mlflow_run_id": mirror.run_id}, text)


COMMAND = Command(
    "sync",
    run,
    add_run_folder,
    about="Send MLflow what a run recorded while its server was away.",
    example="tokendrop sync runs/quickstart-random-ltd-20260101-120000",
)
