"""A sweep in MLflow: a run with its table, beside the runs of its trials, which have its name as a tag.

They are not nested in it: MLflow's page of a run that has others below it draws empty charts.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokendrop.config.run import SWEEP, TrackConfig
from tokendrop.secrets import redact, redact_all
from tokendrop.track.environment import origin
from tokendrop.track.mlflow import Status, connect_to, own_id
from tokendrop.track.mlflow_run import experiment_of, source_tags


def begin_sweep(track: TrackConfig, name: str, folder: Path) -> str:
    """The id of a sweep's run in MLflow, the same at each start; raises what MLflow's client raises."""
    client = connect_to(track.uri)
    experiment_id = experiment_of(client, track)
    known = client.search_runs([experiment_id], f"tags.`tokendrop.id` = '{own_id(folder)}'", max_results=1)
    if known:
        client.update_run(known[0].info.run_id, status="RUNNING")
        return known[0].info.run_id
    tags = {"tokendrop.id": own_id(folder), "tokendrop.kind": "sweep", "tokendrop.folder": str(folder), SWEEP: name}
    tags |= source_tags(origin())
    return client.create_run(experiment_id, run_name=name, tags=redact_all(tags)).info.run_id


def end_sweep(
    track: TrackConfig,
    run_id: str,
    status: Status,
    *,
    table: str,
    result: Mapping[str, Any],
    metrics: Mapping[str, float],
    trials: Iterable[str],
) -> None:
    """Send what a sweep came to; raises what MLflow's client raises.

    Args:
        table: as people read it.
        result: as scripts read it.
        trials: the ids of its trials' runs; those of other sweeps get its name beside theirs.
    """
    client = connect_to(track.uri)
    name = client.get_run(run_id).data.tags[SWEEP]
    client.log_text(run_id, redact(table), "table.txt")
    client.log_dict(run_id, redact_all(result), "sweep.json")
    for key, value in metrics.items():
        client.log_metric(run_id, key, value)
    client.set_terminated(run_id, status)
    for trial in trials:
        with suppress(Exception):  # it was deleted there
            names = client.get_run(trial).data.tags.get(SWEEP, "").split(", ")
            if name not in names:
                client.set_tag(trial, SWEEP, ", ".join(filter(None, [*names, name])))
