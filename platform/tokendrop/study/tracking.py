"""A sweep as MLflow sees it, while it goes on and once it has ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

from tokendrop.config.run import TrackConfig
from tokendrop.errors import first_line
from tokendrop.output import log
from tokendrop.study.arms import arms_of, best_of
from tokendrop.study.progress import Progress
from tokendrop.study.tables import result_of, result_text
from tokendrop.track.mlflow import Status
from tokendrop.track.sweeps import begin_sweep, end_sweep


@contextmanager
def in_mlflow(track: TrackConfig, progress: Progress) -> Iterator[None]:
    """Around the training of a sweep; a server that is away keeps no trial from training."""
    run_id = _begin(track, progress) if track.uri else None
    status: Status = "KILLED"
    try:
        yield
        status = "FAILED" if progress.failures else "FINISHED"
    finally:
        if run_id is not None:
            _end(track, run_id, status, progress)


def _begin(track: TrackConfig, progress: Progress) -> str | None:
    """It makes MLflow's tables too, before several trials do so at once."""
    try:
        return begin_sweep(track, progress.sweep.name, progress.record.folder)
    except Exception as error:  # of the server, of its store
        log(f"mlflow   not reached ({first_line(error)}); the trials go on without it")
        return None


def _end(track: TrackConfig, run_id: str, status: Status, progress: Progress) -> None:
    sweep, trials = progress.sweep, [*progress.trials.values()]
    arms = arms_of(sweep, trials, progress.summaries)
    best = best_of(sweep, arms)
    ended = {"finished": progress.summaries, "failed": progress.failures, "stopped_early": progress.stopped}
    metrics: dict[str, float] = {f"sweep/{name}": len(one) for name, one in ended.items()}
    if best is not None and best.value is not None and isfinite(best.value):
        metrics[f"sweep/best_{sweep.metric}"] = best.value
    ids = [summary.get("mlflow_run_id") for summary in progress.summaries.values()]
    try:
        end_sweep(
            track,
            run_id,
            status,
            table=result_text(sweep, arms, progress),
            result=result_of(sweep, trials, arms, progress),
            metrics=metrics,
            trials=[one for one in ids if one],
        )
    except Exception as error:
        log(f"mlflow   not reached ({first_line(error)}); it does not have what the sweep came to")
