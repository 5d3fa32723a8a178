"""The commands that train: one job, or several and what each saves against the first."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.render import print_json, print_text, progress_line, say
from tokendrop.render_runs import comparison_text, run_text


def train(options: argparse.Namespace) -> None:
    if options.resume is None and options.job is None:
        raise UserError("train: want a job file, or --resume RUN")
    job = options.job
    if options.resume is not None and (job is None or "=" in job):
        from tokendrop.track.run_folder import JOB, open_run_folder

        open_run_folder(options.resume)
        options.overrides = [*([job] if job else []), *options.overrides]
        job = options.resume / JOB
    config = job_to_train(job, options.overrides)
    result = trained(config, resume=options.resume)
    if options.json:
        print_json(result)
    else:
        print_text(run_text(result, config.name))
        print_text(
            f"layer tokens saved: {result['layer_token_saving']:.1%}   FLOPs saved: {result['flops_saving']:.1%}"
        )
        print_text(where_to_look([result], config))


def compare(options: argparse.Namespace) -> None:
    configs = [job_to_train(job, options.set) for job in options.jobs]
    results = [trained(config) for config in configs]
    step_times, reason = step_times_of(configs)
    if options.json:
        print_json({"runs": results, "step_time_over_first": step_times, "not_timed": reason})
    else:
        names = [config.name for config in configs]
        print_text("\n" + comparison_text(results, names, step_times=step_times, not_timed=reason))
        print_text(where_to_look(results, configs[0]))


def step_times_of(configs: Sequence[ExperimentConfig]) -> tuple[list[dict[str, Any]] | None, str | None]:
    """What each job's steps take over those of the first, timed in turns; None, and why, where that can't be."""
    from tokendrop.bench.side_by_side import time_side_by_side, why_not_timed

    if reason := why_not_timed(configs):
        return None, reason
    with progress_line("timing   the jobs' steps side by side:", "turns") as progress:
        return time_side_by_side(configs, progress), None


def job_to_train(job: str | Path, overrides: Sequence[str]) -> ExperimentConfig:
    """A job with absolute paths of its results."""
    config = load_job(job, overrides)
    from tokendrop.launch.results import with_absolute_paths

    return with_absolute_paths(config)


def trained(config: ExperimentConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Train on Ray; a run that fails ends the command with one line and exit code 1."""
    import ray
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from tokendrop.launch.results import tell_place
    from tokendrop.launch.stopping import stopping_in_time
    from tokendrop.launch.trainer import run_training

    tell_place(config)
    try:
        with stopping_in_time():
            return run_training(config, resume=resume)
    except KeyboardInterrupt:
        ray.shutdown()  # at the exit it would wait half a second more, for logs that are not shown
        raise
    except (TrainingFailedError, RayError, OSError) as error:
        say(f"{error}\ntokendrop: the run failed (scaling.max_restarts={config.scaling.max_restarts})")
        sys.exit(1)


def where_to_look(results: Sequence[dict[str, Any]], config: ExperimentConfig) -> str:
    """Where to look at what was made."""
    lines = ["", *(f"run folder  {result['run']}" for result in results)]
    if config.track.uri and config.track.uri.startswith("sqlite:"):
        mlflow = "mlflow" if shutil.which("mlflow") else f"{sys.executable} -m mlflow"
        lines.append(f"curves      {mlflow} ui --backend-store-uri {config.track.uri}   then http://127.0.0.1:5000")
    elif config.track.uri:
        lines.append(f"curves      {config.track.uri}, experiment {config.track.experiment}")
    return "\n".join(lines)
