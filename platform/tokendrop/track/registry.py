"""MLflow's model registry: a run's model as a version of a registered model."""

from pathlib import Path
from typing import Any

MODEL = "model"
"""The artifact of the run that holds it."""


def version_of(client: Any, run_id: str | None, name: str) -> str | None:
    """The newest version of a registered model that a run has become; None where it has become none."""
    found = [one for one in client.search_model_versions(f"run_id = '{run_id}'") if one.name == name]
    return max((str(one.version) for one in found), key=int, default=None)


def add_version(client: Any, run_id: str | None, name: str, model: Path) -> str:
    """Send a folder to a run and make it a version of a registered model, which is made where there is none."""
    from mlflow.exceptions import MlflowException

    client.log_artifacts(run_id, str(model), MODEL)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(run_id).info.artifact_uri}/{MODEL}"
    return str(client.create_model_version(name, source, run_id, await_creation_for=0).version)
