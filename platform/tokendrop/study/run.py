"""A sweep from what is known of its trials to what has become of them all."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import is_uri
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect
from tokendrop.launch.head_watch import HeadWatch
from tokendrop.launch.initial import with_epochs, with_initial
from tokendrop.launch.memory import check_memory
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.room import check_ray, check_room
from tokendrop.launch.trainer import send_with_jobs
from tokendrop.launch.watch import prepare_line
from tokendrop.output import log
from tokendrop.study.progress import Progress
from tokendrop.study.record import SweepRecord, finished
from tokendrop.study.sweep import SweepConfig
from tokendrop.study.tracking import in_mlflow
from tokendrop.study.trials import Trial, TrialMaker
from tokendrop.study.tuning import search_all, train_all
from tokendrop.train.installed import check_installed


def run_sweep(
    sweep: SweepConfig,
    trials: Sequence[Trial],
    maker: TrialMaker | None = None,
    *,
    path: Path,
    retry_failed: bool = False,
) -> Progress:
    """Train every trial that has not been trained yet, and return how far the sweep has come.

    Args:
        trials: all of them; none where a searcher chooses them.
        maker: makes those that a searcher chooses.
        path: of the sweep file.
        retry_failed: whether those that failed in an earlier start are tried again.
    Raises:
        UserError: something is wrong with the jobs, the corpus, or the metric.
    """
    base = with_absolute_paths(trials[0].config if maker is None else maker.base_trial().config)
    if is_uri(base.runs_folder):
        raise UserError(f"runs_folder: a sweep keeps its runs in a folder, not in {base.runs_folder}; want a path")
    record = SweepRecord(Path(base.runs_folder), sweep.name)
    with record.opened(path, trials):
        if retry_failed:
            record.forget_failures()
        progress = Progress(sweep, trials, record)
        left = {trial.run: job for trial in trials if (job := _begun(trial, progress)) is not None}
        progress.raise_fault()
        log(f"sweep    {record.folder}: {progress.counts()}")
        if maker is not None:
            with _on_ray({base.name: base}, progress) as ready:
                search_all(maker, ready[base.name], progress, begun=partial(_begun, progress=progress))
        elif left:
            with _on_ray(left, progress) as ready:
                train_all(left, ready, progress)
        else:
            with in_mlflow(base.track, progress):
                pass  # which may not know yet what the trials have come to
        return progress


def _begun(trial: Trial, progress: Progress) -> ExperimentConfig | None:
    """The job of a trial that is to be trained; None where one knows what became of it.

    Raises:
        UserError: it can't train here.
    """
    job = with_absolute_paths(trial.config)
    _look_up(trial, job, progress)
    if not progress.is_open(trial.run):
        return None
    _check(job, trial.text)
    send_with_jobs(job.drop, job.task)
    return job


def _look_up(trial: Trial, job: ExperimentConfig, progress: Progress) -> None:
    """Note what is known of a trial from an earlier start, or another sweep."""
    try:
        summary = finished(job)
    except UserError as error:  # its folder is damaged; the others are not
        progress.note(trial.run, str(error))
        return
    if summary is not None:
        progress.finish(trial.run, summary)
    elif reason := progress.record.failure(trial.run):
        progress.note(trial.run, reason)
    elif progress.sweep.scheduler is not None and (report := progress.record.stopped(trial.run)):
        progress.note_stopped(trial.run, report)


@contextmanager
def _on_ray(jobs: Mapping[str, ExperimentConfig], progress: Progress) -> Iterator[dict[str, ExperimentConfig]]:
    """Ray, as long as the block lasts, and the jobs that can begin."""
    connect(name=progress.sweep.name)
    with HeadWatch() as head:
        ready = _prepared(jobs, progress)
        head.what_now = "the same command goes on with the sweep"
        if not ready:
            yield {}
            return
        first = next(iter(ready.values()))
        check_room(first)
        with in_mlflow(first.track, progress):
            yield ready


def _check(job: ExperimentConfig, which: str) -> None:
    """Raises UserError where a job can't train here, before anything is started."""
    if job.evaluate.tasks:
        raise UserError(
            "evaluate.tasks: trials are not evaluated as they train; want 'set: {evaluate.tasks: []}' in the sweep,"
            " and 'tokendrop evaluate' on their runs"
        )
    try:
        job.task.build(job)
        check_installed(job.train)
        check_memory(job)
        check_ray(job.scaling)
    except UserError as error:
        raise UserError(f"trial ({which}): {error}") from None


def _prepared(jobs: Mapping[str, ExperimentConfig], progress: Progress) -> dict[str, ExperimentConfig]:
    """The jobs whose token shards are made, each corpus once; trials that their corpus is no good for have failed.

    Raises:
        UserError: this is so for all trials of the sweep.
    """
    ready: dict[str, ExperimentConfig] = {}
    faults: dict[str, UserError] = {}
    for run, job in jobs.items():
        try:
            begun = with_initial(job)
            if begun.waits_for_epochs:
                begun = with_epochs(begun)
            with prepare_line(begun) as told:
                prepare(begun, progress=told)
            ready[run] = begun
        except UserError as error:
            faults[run] = error
    if faults and not ready and not progress.summaries:
        raise next(iter(faults.values()))
    for run, error in faults.items():
        progress.fail(run, str(error), "")
    return ready
