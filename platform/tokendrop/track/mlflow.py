"""MLflow, fed from the run folder: training never waits for it and never fails because of it."""

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from tokendrop.atomic import atomic_write
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.task import TaskConfig
from tokendrop.errors import UserError
from tokendrop.secrets import HIDDEN, redact, redact_all, restored, variables
from tokendrop.track.decisions import DECISIONS
from tokendrop.track.evaluations import EVALUATIONS, RESULT, flat_metrics, note_sent, unsent
from tokendrop.track.journal import MetricsTail
from tokendrop.track.mlflow_run import FORBIDDEN, SQLITE, datasets_of, experiment_of, span_ms, tags_of
from tokendrop.track.parameters import parameters
from tokendrop.track.registry import add_version, version_of
from tokendrop.track.run_folder import ENVIRONMENT, JOB, PLAN

STATE, ID = "mlflow.json", "id.txt"
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
_BATCH, _PARAMS = 1000, 100  # metrics and parameters that one call of MLflow's API takes
_BEGIN: dict[str, Any] = {"run_id": None, "experiment_id": None, "described": False, "offset": 0, "artifacts": {}}
_BEGIN |= {"status": "RUNNING", "status_sent": "RUNNING", "version": None}

# metric in MLflow: field of StepReport. Its page has a section of charts for each prefix, by the alphabet: the loss
# comes first, and what has but a point for each evaluation comes last.
METRICS = {
    "loss/train": "loss",
    "loss/validation": "val_loss",
    "progress/layer_tokens": "layer_tokens",
    "progress/tokens": "tokens",
    "progress/flops": "flops",
    "schedule/kept_length": "kept_length",
    "schedule/learning_rate": "lr",
    "schedule/world_size": "world_size",
    "speed/step_time_s": "step_time_s",
    "speed/data_time_s": "data_time_s",
    "training/grad_norm": "grad_norm",
}
FIGURES, UNSEEN = "quality", "unseen"
"""Prefixes of what a task measures at each validation, and of evaluations."""


class MlflowMirror:
    """Mirrors a run folder to one MLflow run, however often the run was restarted or the server was away.

    What was sent is remembered in the run folder as an offset into metrics.jsonl; `sync` sends what came since.
    """

    def __init__(self, folder: Path, config: ExperimentConfig) -> None:
        self.folder, self.config = folder, config
        self.state = _read_state(folder / STATE)
        self._remembering = threading.Lock()

    @property
    def run_id(self) -> str | None:
        """Of the run in MLflow; None before it was reached."""
        return self.state["run_id"]

    def sync(self, status: Status | None = None) -> None:
        """Send everything that MLflow does not have yet; raises what its client raises when it can't.

        An artifact that it does not take stops nothing else; the next call tries it again.

        Args:
            status: what has become of the run; sent after its metrics.
        """
        from mlflow.entities import Metric

        if status is not None:
            self.note_status(status)
        client = connect_to(self.config.track.uri)
        if self.run_id is None:
            info = self._create(client).info
            self._remember(run_id=info.run_id, experiment_id=info.experiment_id)
        if not self.state["described"]:
            self._send_settings(client)
            self._remember(described=True)
        tail = MetricsTail(self.folder, self.state["offset"])
        while lines := tail.read():
            metrics = [Metric(*point) for point in _points(lines, self.config.task)]
            for first in range(0, len(metrics), _BATCH):
                client.log_batch(self.run_id, metrics=metrics[first : first + _BATCH])
            self._remember(offset=tail.offset)
        if self.state["status"] != self.state["status_sent"]:
            client.update_run(self.run_id, status=self.state["status"])
            if self.state["status"] != "RUNNING":
                client.set_terminated(self.run_id, self.state["status"], span_ms(self.folder)[1])
            self._remember(status_sent=self.state["status"])
        self._send_artifacts(client)
        self.sync_evaluations()

    def note_status(self, status: Status) -> None:
        """Remember what has become of the run, for the next `sync`."""
        self._remember(status=status)

    def sync_evaluations(self) -> None:
        """Send the evaluations that MLflow does not have yet; raises what its client raises when it can't.

        Their numbers are `unseen/<task>_<metric>` at the step of the checkpoint, without standard errors; the versions
        of tasks are tags; their files, with all figures and with the samples where they were logged, are artifacts.
        """
        from mlflow.entities import Metric

        if self.run_id is None:
            return self.sync()
        client = connect_to(self.config.track.uri)
        for folder, result in unsent(self.folder):
            stamp, step = int((folder / RESULT).stat().st_mtime * 1000), result["step"]
            values = flat_metrics(result).items()
            metrics = [Metric(f"{UNSEEN}/{FORBIDDEN.sub('-', name)}", value, stamp, step) for name, value in values]
            for first in range(0, len(metrics), _BATCH):
                client.log_batch(self.run_id, metrics=metrics[first : first + _BATCH])
            for task, version in result["versions"].items():
                client.set_tag(self.run_id, f"{UNSEEN}/{FORBIDDEN.sub('-', task)}_version", str(version))
            client.log_artifacts(self.run_id, str(folder), f"{EVALUATIONS}/{folder.name}")
            note_sent(folder, self.run_id)

    @property
    def version(self) -> str | None:
        """Of the registered model that the run has become; None before it was registered."""
        return self.state["version"]

    def register(self, model: Path) -> None:
        """Send a model's folder, and make it a version of `track.register`; raises what MLflow's client raises.

        A version that the run has become in an earlier call, which was not heard of, is taken for it.
        """
        client, name = connect_to(self.config.track.uri), redact(self.config.track.register or "")
        if self.run_id is None:
            self.sync()
        self._remember(version=version_of(client, self.run_id, name) or add_version(client, self.run_id, name, model))

    def _create(self, client: Any) -> Any:
        experiment_id = experiment_of(client, self.config.track)
        # An earlier call may have been answered by a time-out after the server had done it.
        known = client.search_runs([experiment_id], f"tags.`tokendrop.id` = '{own_id(self.folder)}'", max_results=1)
        if known:
            return known[0]
        tags = {**tags_of(self.folder, self.config), "tokendrop.id": own_id(self.folder)}
        begun, _ = span_ms(self.folder)
        return client.create_run(experiment_id, begun, tags, run_name=self.config.name)

    def _send_settings(self, client: Any) -> None:
        """Send what MLflow takes once and for all: the job's settings, and what it trains on."""
        from mlflow.entities import Param

        known = client.get_run(self.run_id).data.params  # of an earlier attempt
        settings = redact_all(parameters(self.config))
        params = [Param(key, value) for key, value in settings.items() if key not in known]
        for first in range(0, len(params), _PARAMS):
            client.log_batch(self.run_id, params=params[first : first + _PARAMS])
        if datasets := datasets_of(self.folder, self.config):
            client.log_inputs(self.run_id, datasets)

    def _send_artifacts(self, client: Any) -> None:
        """Send the files that describe the run, each when it has changed; raises the first failure at the end."""
        failures: list[Exception] = []
        decided = [DECISIONS] if (self.folder / DECISIONS).exists() else []
        for name in (JOB, PLAN, ENVIRONMENT, *decided):
            try:
                checksum = hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
                if self.state["artifacts"].get(name) != checksum:
                    client.log_artifact(self.run_id, str(self.folder / name))
                    self._remember(artifacts={**self.state["artifacts"], name: checksum})
            except Exception as error:  # of the disk, of MLflow's server or of the store that it names
                failures.append(error)
        if failures:
            raise failures[0]

    def _remember(self, **changes: Any) -> None:
        with self._remembering:  # the end of a run is noted while a server is waited for
            self.state |= changes
            atomic_write(self.folder / STATE, json.dumps(self.state).encode())


def _read_state(path: Path) -> dict[str, Any]:
    """What MLflow has by now; where the file is damaged all is sent again, and the MLflow run takes it once."""
    if not path.exists():
        return dict(_BEGIN)
    if (state := _told(path)) is not None:
        return state
    logging.getLogger(__name__).warning("mlflow   %s is damaged; MLflow is told everything again", path)
    return dict(_BEGIN)


def _told(path: Path) -> dict[str, Any] | None:
    """What the file says; None where it is damaged."""
    try:
        state = {**_BEGIN, **json.loads(path.read_text())}
        kinds = {"run_id": str | None, "experiment_id": str | None, "described": bool, "offset": int}
        kinds |= {"status": str, "status_sent": str, "artifacts": dict, "version": str | None}
        if state["offset"] >= 0 and all(isinstance(state[key], kind) for key, kind in kinds.items()):
            return state
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    return None


def page_of(folder: Path) -> str:
    """Behind the address of MLflow: the runs of a run's experiment in the view of training, which is not the default.

    All experiments where MLflow was not reached.
    """
    experiment_id = (_told(folder / STATE) or _BEGIN)["experiment_id"]
    return "/#/experiments" + (f"/{experiment_id}?workflowType=machine_learning" if experiment_id else "")


def own_id(folder: Path) -> str:
    """What a run is known by in MLflow, whatever its folder is called and wherever it lies; made once."""
    path = folder / ID
    if not (path.is_file() and re.fullmatch(rb"[0-9a-f]{32}\n", path.read_bytes())):
        atomic_write(path, f"{uuid4().hex}\n".encode())
    return path.read_text().strip()


def connect_to(uri: str | None) -> Any:
    """MLflow's client; imported late, for it costs seconds, and told to give up rather than to wait for minutes.

    Raises:
        UserError: the secret of its address is hidden in the run folder, and not in the environment.
    """
    if uri and HIDDEN in uri:
        whole = restored(uri, is_tracking=True)
        if whole is None:
            names = variables(uri, is_tracking=True)
            raise UserError(f"track.uri: {uri}: its secret was not written down; set {names}")
        uri = whole
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # where a command's own result goes
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # which tell of every table that they make
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def absolute_uri(uri: str | None, folder: Path) -> str | None:
    """A tracking URI that means the same from every folder; paths, of a SQLite file too, relative to `folder` before.

    URIs of servers stay: `http://...`, `postgresql://...`, `databricks`.
    """
    if uri is None or uri.startswith("databricks"):
        return uri
    for scheme in (SQLITE, "file:"):
        if uri.startswith(scheme) and not uri.startswith("file://"):
            return f"{scheme}{folder / uri.removeprefix(scheme)}"
    return uri if ":" in uri else str(folder / uri)


def _points(lines: list[dict[str, Any]], task: TaskConfig) -> Iterator[tuple[str, float, int, int]]:
    for line in lines:
        if "step" not in line:
            continue
        stamp = int(line.get("time", time.time()) * 1000)
        for name, field in METRICS.items():
            if line[field] is not None:
                yield name, float(line[field]), stamp, line["step"]
        if line["val_loss"] is None:
            continue
        for name, value in task.figures(line["val_loss"], line.get("val_figures") or {}).items():
            yield f"{FIGURES}/{name}", value, stamp, line["step"]
