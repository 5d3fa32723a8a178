"""What MLflow is told of a run at its begin: its experiment, where it comes from, what it reads, when it was."""

import json
import re
from pathlib import Path
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.run import TrackConfig
from tokendrop.secrets import redact, redact_all
from tokendrop.track.environment import origin_of
from tokendrop.track.journal import recorded_span
from tokendrop.track.lineage import read_lineage
from tokendrop.track.run_folder import DATA, ENVIRONMENT
from tokendrop.train.sealed import read_sealed_text

KIND, TRAINING = "mlflow.experimentKind", "custom_model_development"
"""The tag of an experiment that says it is one of training; MLflow 3.17's page opens in the view last chosen there."""
COMMAND = "tokendrop.command"
SQLITE = "sqlite:///"
FORBIDDEN = re.compile(r"[^\w\-./ ]")  # in a metric's name
_LONGEST_TAG, _LONGEST_NAME = 4000, 250  # characters; MLflow takes some more


def experiment_of(client: Any, track: TrackConfig) -> str:
    """The id of the experiment that a job names; it is made where there is none.

    It is marked as one of training, unless somebody has said of which kind it is.
    """
    name = redact(track.experiment)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name, _artifacts(track), tags={KIND: TRAINING})
    if KIND not in experiment.tags:
        client.set_experiment_tag(experiment.experiment_id, KIND, TRAINING)
    return experiment.experiment_id


def _artifacts(track: TrackConfig) -> str | None:
    """A place beside a local SQLite file; by default it would be below the folder of whoever is first."""
    path = (track.uri or "").removeprefix(SQLITE)
    if path == track.uri:
        return None  # a server has a place of its own
    return (Path(path).absolute().parent / "mlruns" / FORBIDDEN.sub("-", redact(track.experiment))).as_uri()


def tags_of(folder: Path, config: ExperimentConfig) -> dict[str, str]:
    """The tags that a run has in MLflow, without secrets; those of the job win over what is known of its origin."""
    lineage = read_lineage(folder)
    tags = {
        **source_tags(origin_of(folder / ENVIRONMENT)),
        **config.track.tags,
        **(lineage.tags if lineage else {}),
        "tokendrop.run": folder.name,
        "tokendrop.folder": str(folder),
        "method": config.drop.method,
        "model": config.model.preset or config.model.kind,
        "lr_clock": config.train.lr_clock,
        "seed": str(config.seed),
        "layer_token_saving": f"{config.plan.layer_token_saving():.1%}",
    }
    return redact_all(tags)


def source_tags(origin: dict[str, str]) -> dict[str, str]:
    """MLflow's system tags of where a run comes from, of what is known of it."""
    names = {"source": "mlflow.source.name", "user": "mlflow.user", "source_commit": "mlflow.source.git.commit"}
    tags = {name: origin[key] for key, name in names.items() if key in origin}
    if "source" in origin:
        tags["mlflow.source.type"] = "LOCAL"
    if "command" in origin:
        tags[COMMAND] = origin["command"][:_LONGEST_TAG]
    return tags


def span_ms(folder: Path) -> tuple[int, int] | tuple[None, None]:
    """When the record of a run begins and ends by now, in milliseconds; None and None before it has begun."""
    span = recorded_span(folder)
    return (round(span[0] * 1000), round(span[1] * 1000)) if span else (None, None)


def datasets_of(folder: Path, config: ExperimentConfig) -> list[Any]:
    """What a run trains on, as MLflow's inputs: its corpus by name, and the identity of its token shards as digest.

    Empty where the run folder does not say yet where these are.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if not (folder / DATA).is_file():
        return []
    shards = Path(read_sealed_text(folder / DATA).splitlines()[0])
    data = config.data
    names = [one.name for one in data.mixture] if data.sources else [Path(entry).name for entry in data.corpus]
    dataset = Dataset(
        name=redact(", ".join(names))[:_LONGEST_NAME],
        digest=shards.name[:36],  # as many characters as MLflow takes
        source_type="local",
        source=json.dumps({"uri": redact(str(shards))}),
    )
    return [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])]
