"""`tokendrop sync`: MLflow catches up with a run folder."""

import argparse

from tokendrop.cli.arguments import add_run_folder
from tokendrop.cli.command import Command, Outcome, fail
from tokendrop.errors import UserError


def run(options: argparse.Namespace) -> Outcome:
    """Send what MLflow lacks, and register the model where the job asks for it; exit code 1 where its server is away.

    Raises:
        UserError: it is no run folder, or that of a run that is not tracked.
    """
    from tokendrop.track.mlflow import MlflowMirror
    from tokendrop.track.run_folder import open_run_folder

    config, _ = open_run_folder(options.run_folder)
    if config.track.uri is None:
        raise UserError(f"{options.run_folder}: this run is not tracked (track.uri is null)")
    mirror, version = MlflowMirror(options.run_folder, config), None
    try:
        mirror.sync()
        if config.track.register is not None:
            from tokendrop.evaluate.register import register_run

            version = register_run(options.run_folder)
    except UserError:
        raise
    except Exception as error:  # MLflow's clients raise whatever their transport does
        fail(f"{config.track.uri} can't be reached ({error})")
    text = f"MLflow run {mirror.run_id} at {config.track.uri} has everything"
    if version is not None:
        text += f"; its model is version {version} of {config.track.register}"
    return Outcome({"mlflow_run_id": mirror.run_id, "version": version}, text)


COMMAND = Command(
    "sync",
    run,
    add_run_folder,
    about="Send MLflow what a run recorded while its server was away.",
    example="tokendrop sync runs/quickstart-random-ltd-20260101-120000",
)
