"""`tokendrop train`: one run, on this machine or on the cluster at RAY_ADDRESS."""

import argparse
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokendrop.cli.arguments import add_overrides, job_file, run_here, run_place, shortened
from tokendrop.cli.command import Command, Outcome, fail
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.output import count, log, table

_OF_VALIDATION = "val_"


def arguments(parser: argparse.ArgumentParser) -> None:
    """JOB, or the run that goes on."""
    parser.add_argument(
        "job", type=job_file, nargs="?", help="job file (YAML); with --resume, the run's own when left out"
    )
    add_overrides(parser)
    parser.add_argument("--resume", type=run_place, metavar="RUN", help="go on from the last checkpoint of this run")


def run(options: argparse.Namespace) -> Outcome:
    """Train one job.

    Raises:
        UserError: something is wrong with the job, or with the run that should go on.
    """
    if options.resume is None and options.job is None:
        raise UserError("train: want a job file, or --resume RUN")
    job, overrides, resume = options.job, options.overrides, options.resume and run_here(options.resume)
    if resume is None and "=" in job:
        raise UserError(f"train: want a job file before the overrides, got {shortened(job)}")
    if resume is not None and (job is None or "=" in job):
        from tokendrop.track.run_folder import JOB, open_run_folder

        open_run_folder(resume)
        job, overrides = resume / JOB, [*([job] if job else []), *overrides]
    config = job_to_train(job, overrides)
    result = trained(config, resume=resume)
    saved = f"layer tokens saved: {result['layer_token_saving']:.1%}   FLOPs saved: {result['flops_saving']:.1%}"
    return Outcome(result, "\n".join([run_text(result, config.name), saved, where_to_look([result], config)]))


def job_to_train(job: str | Path, overrides: Sequence[str]) -> ExperimentConfig:
    """A job with absolute paths of its results.

    Raises:
        UserError: something is wrong with it.
    """
    config = load_job(job, overrides)
    from tokendrop.launch.results import with_absolute_paths

    return with_absolute_paths(config)


def trained(config: ExperimentConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Train on Ray, from the start or from a run folder's last checkpoint; exit code 1 where the run fails.

    Raises:
        UserError: something is wrong with the job that shows as it starts.
    """
    import ray
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from tokendrop.launch.results import tell_place
    from tokendrop.launch.stopping import stopping_in_time
    from tokendrop.launch.trainer import run_training

    evaluate = register = None
    if config.evaluate.tasks:
        from tokendrop.evaluate.beside import check_tasks
        from tokendrop.evaluate.beside import evaluate_beside as evaluate

        check_tasks(config)
    if config.track.register is not None:
        from tokendrop.evaluate.register import register_trained as register  # a package that it lacks is missed now
    tell_place(config)
    try:
        with stopping_in_time():
            result = run_training(config, resume=resume, evaluate=evaluate)
            if register is not None:
                register(Path(result["run"]))
            return result
    except KeyboardInterrupt:
        ray.shutdown()  # at the exit it would wait half a second more, for logs that are not shown
        raise
    except (TrainingFailedError, RayError, OSError) as error:
        log(str(error))
        fail(f"the run failed (scaling.max_restarts={config.scaling.max_restarts})")


def run_text(result: Mapping[str, Any], name: str) -> str:
    """What a run came to."""
    names = figure_names([result])
    cells = [*run_figures(result, result, names), f"{result['wall_clock_s']:.1f} s", f"{result['tokens_per_s']:,.0f}"]
    header = ["run", *names, "layer tokens", "FLOPs", "training time", "tokens/s"]
    return table(header, [[name, *cells]])


def figure_names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What runs were validated by: the loss first, and what their tasks measure beside it."""
    keys = dict.fromkeys(key for result in results for key in result if key.startswith(_OF_VALIDATION))
    return ["val loss", *(_words(key) for key in keys if key != "val_loss")]


def run_figures(result: Mapping[str, Any], first: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Figures of a run by `figure_names`, then its layer tokens and FLOPs, also against those of the first."""
    found = {_words(key): value for key, value in result.items() if key.startswith(_OF_VALIDATION)}
    found["val loss"] = result["val_loss"]

    def with_saving(key: str) -> str:
        return count(result[key]) + ("" if result is first else f" ({change(result[key] / first[key])})")

    figures = [f"{found[name]:{'.1f' if name == 'perplexity' else '.3f'}}" if name in found else "" for name in names]
    return [*figures, with_saving("layer_tokens"), with_saving("flops")]


def _words(key: str) -> str:
    return key.removeprefix(_OF_VALIDATION).replace("_", " ")


def change(ratio: float) -> str:
    """0.8 as -20.0%."""
    return f"{ratio - 1:+.1%}"


def where_to_look(results: Sequence[Mapping[str, Any]], config: ExperimentConfig) -> str:
    """Where runs lie, and how to see their curves."""
    from tokendrop.track.mlflow import page_of

    lines = ["", *(f"run folder  {result.get('address', result['run'])}" for result in results)]
    page = page_of(Path(results[0]["run"]))
    if config.track.uri and config.track.uri.startswith("sqlite:"):
        mlflow = "mlflow" if shutil.which("mlflow") else f"{sys.executable} -m mlflow"
        lines.append(f"curves      {mlflow} ui --backend-store-uri {shlex.quote(config.track.uri)}")
        lines.append(f"            then http://127.0.0.1:5000{page}")
    elif uri := config.track.uri:
        place = uri.rstrip("/") + page if uri.startswith("http") else uri
        lines.append(f"curves      {place}, experiment {config.track.experiment}")
    return "\n".join(lines)


COMMAND = Command(
    "train",
    run,
    arguments,
    about="Pretrain by a job file, on this machine or on the Ray cluster at RAY_ADDRESS.",
    example="tokendrop train jobs/pretrain/quickstart.yaml scaling.workers=2 train.micro_batch=4",
)
