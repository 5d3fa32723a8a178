"""What a sweep leaves behind beside its runs: the folder `sweeps/NAME` in their `runs_folder`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokendrop.atomic import atomic_write, exclusive_lock
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import shown
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.study.identity import differences, settings_of
from tokendrop.study.trials import Trial
from tokendrop.track.mlflow import MlflowMirror
from tokendrop.track.run_folder import DATA, JOB, SWEEPS, TRIALS, begun_run, open_run_folder, summarize
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step

FAILED, STOPPED, CHOSEN = "failed", "stopped", "chosen.json"


class SweepRecord:
    """A sweep's folder: its trials with their settings, why some failed, which were stopped early, what was chosen."""

    def __init__(self, runs_folder: Path, name: str) -> None:
        self.folder = runs_folder / SWEEPS / name
        self._runs_folder = runs_folder

    @contextmanager
    def opened(self, path: Path, trials: Sequence[Trial]) -> Iterator[None]:
        """Around the work on a sweep: one process at a time.

        Args:
            path: of the sweep file.
        Raises:
            UserError: it is the sweep of another file, or another process is at work on it.
        """
        self.check(path)
        with exclusive_lock(self.folder, patience_s=2.0):
            self._path = path.resolve()
            self.add(trials)
            yield

    def run_folder(self, run: str) -> Path:
        """Of a trial."""
        return self._runs_folder / run

    def add(self, trials: Sequence[Trial]) -> None:
        """Write down what trials are, beside those that are known."""
        settings = {trial.run: dict(trial.settings) for trial in trials}
        told = {"sweep": str(self._path), "trials": self._known() | settings}
        atomic_write(self.folder / TRIALS, json.dumps(told, indent=1).encode())

    def check(self, path: Path) -> None:
        """Raises UserError where the folder is that of another sweep file."""
        was = _read(self.folder / TRIALS).get("sweep")
        if was is not None and Path(was).resolve() != path.resolve():
            raise UserError(f"name: {self.folder} is the sweep of {shown(was)}; want another name")

    def _known(self) -> dict[str, Any]:
        return _read(self.folder / TRIALS).get("trials", {})

    def note_failure(self, run: str, reason: str, details: str = "") -> None:
        """Remember why a trial failed: in one line, and at length."""
        (self.folder / FAILED).mkdir(exist_ok=True)
        text = f"{' '.join(reason.split())}\n\n{details}"
        atomic_write(self.folder / FAILED / f"{run}.txt", text.encode(errors="replace"))

    def failure(self, run: str) -> str | None:
        """Why a trial failed when it was last tried; None where it did not."""
        path = self.folder / FAILED / f"{run}.txt"
        return path.read_text(errors="replace").partition("\n")[0] if path.is_file() else None

    def note_stopped(self, run: str, report: Mapping[str, Any]) -> None:
        """Remember that a trial was ended early, and what it had come to."""
        (self.folder / STOPPED).mkdir(exist_ok=True)
        atomic_write(self.folder / STOPPED / f"{run}.json", json.dumps(dict(report)).encode())

    def stopped(self, run: str) -> dict[str, Any] | None:
        """What a trial had come to that was ended early; None where it was not."""
        return _read(self.folder / STOPPED / f"{run}.json") or None

    def note_chosen(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Remember what a searcher has chosen, in order."""
        atomic_write(self.folder / CHOSEN, json.dumps({"arms": [*choices]}).encode())

    def chosen(self) -> list[dict[str, Any]]:
        """What a searcher has chosen in earlier starts."""
        return _read(self.folder / CHOSEN).get("arms", [])

    def forget_failures(self) -> None:
        """Let all trials that have failed be tried again."""
        for path in (self.folder / FAILED).glob("*.txt"):
            path.unlink(missing_ok=True)


def finished(job: ExperimentConfig) -> dict[str, Any] | None:
    """What `run_training` gave of a trial's run, by this sweep or another; None where it has not come to its end.

    Raises:
        DamagedDataError: what describes its run was changed since.
        UserError: its folder is no run folder, or it was gone on with as another job.
    """
    folder = begun_run(job)
    if folder is None:
        return None
    begun, _ = open_run_folder(folder)
    _check_is_still(folder, begun, job)
    if begun.waits_for_epochs or committed_step(folder / CHECKPOINTS) < begun.plan.steps:
        return None
    is_tracked = begun.track.uri and begun.track.uri == job.track.uri  # else another server knows it
    return {**summarize(folder), "mlflow_run_id": MlflowMirror(folder, begun).run_id if is_tracked else None}


def _check_is_still(folder: Path, begun: ExperimentConfig, job: ExperimentConfig) -> None:
    """Raises UserError where a trial's run was gone on with to another end, or was validated in another way."""
    for key, (was, now) in differences(settings_of(begun), settings_of(job)).items():
        if key == "train.length" or key.startswith("evaluate."):
            raise UserError(f"run: {folder} was gone on with by {key}={was}, this trial has {now}; want it removed")


def settings_at(place: Path) -> dict[str, str]:
    """The settings that decide what is trained: of a trial's run folder, or of a job file.

    Raises:
        UserError: there is neither.
    """
    if place.is_file():
        return settings_of(load_job(place, to_run=False))
    for record in sorted((place.parent / SWEEPS).glob(f"*/{TRIALS}")):
        known = _read(record).get("trials", {})
        if place.name in known:
            return known[place.name]
    if (place / JOB).is_file() and (place / DATA).is_file():
        open_run_folder(place)
        return settings_of(load_job(place / JOB, to_run=False))  # decided no further than the job itself says
    raise UserError(f"{shown(place)}: want the run folder of a trial, such as runs/trial-..., or a job file")


def _read(path: Path) -> dict[str, Any]:
    """What a file of ours holds; nothing where it is missing or damaged: the next start writes it anew."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
