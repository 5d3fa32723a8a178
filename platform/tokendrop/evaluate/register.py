"""The model of a finished run in MLflow's model registry, where its job asks for it."""

import tempfile
from pathlib import Path

from tokendrop.evaluate.export import export_checkpoint
from tokendrop.output import log
from tokendrop.secrets import redact
from tokendrop.track.mlflow import MlflowMirror
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step


def register_run(run: Path) -> str | None:
    """Register the model of a finished run as a version of `track.register`; the number of the version.

    What is registered is the folder that `tokendrop export` writes, as the artifact `model` of the run in MLflow: what
    `mlflow.artifacts.download_artifacts("models:/NAME/VERSION")` gives is for a `from_pretrained`. None where the job
    does not ask for it, or the run has not ended. A run is registered once.

    Raises:
        UserError: it is no run folder, or nobody else has a format for such a model.
    """
    config, _ = open_run_folder(run)
    if config.track.register is None or committed_step(run / CHECKPOINTS) < config.steps:
        return None
    mirror = MlflowMirror(run, config)
    if mirror.version is None:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=run) as folder:
            model, _ = export_checkpoint(run, Path(folder) / "model")
            mirror.register(model)
    return mirror.version


def register_trained(run: Path) -> None:
    """The same at the end of training, which does not fail by it: it costs one line on standard error."""
    try:
        register_run(run)
    except Exception as error:  # of the export, or whatever a server or its client does
        reason = redact(" ".join(str(error).split()))[:120] or type(error).__name__
        log(f"mlflow   the model is not registered ({reason}); `tokendrop sync {run}` tries it again")
