"""`tokendrop bench`: each measurement imports only what it measures."""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from tokendrop.cli import device
from tokendrop.cli.arguments import add_overrides, number, path, whole
from tokendrop.cli.command import Command, Group, Outcome, fail
from tokendrop.config.model import PRESETS
from tokendrop.errors import UserError
from tokendrop.output import log, table


def run(measure: Callable[[argparse.Namespace], Mapping[str, Any]], options: argparse.Namespace) -> Outcome:
    """Measure; exit code 1 where a process of the measurement fails.

    Raises:
        UserError: of the measurement.
    """
    try:
        result = measure(options)
    except CalledProcessError as error:  # which has said why
        fail(f"{options.command.name}: a process of it ended with exit code {error.returncode}: {error.cmd}")
    return Outcome(result, bench_text(result))


def bench_text(result: Mapping[str, Any]) -> str:
    """Figures of a benchmark, with their spread."""
    rows = [
        [name, f"{figure['median']:.4g}", f"{figure['min']:.4g}", f"{figure['max']:.4g}", figure["unit"]]
        for name, figure in result["figures"].items()
    ]
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return f"{table(['figure', 'median', 'min', 'max', 'unit'], rows)}\n\n{machine}\n{result['command']}"


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=whole(1), default=7, help="interleaved repeats (default 7)")


def _add_job(parser: argparse.ArgumentParser, usual: str) -> None:
    default = Path("jobs", "pretrain", usual)
    parser.add_argument("--job", type=path, default=default, help=f"job file (default {default})")


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser)
    parser.add_argument("--preset", choices=PRESETS, help="model; by device when left out")
    parser.add_argument("--micro-batch", type=whole(1), help="sequences of one step (default 8, of images 32)")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")


def _step(options: argparse.Namespace) -> Mapping[str, Any]:
    """With torch, numpy and PyYAML alone."""
    from tokendrop.bench.step import bench_step

    return bench_step(
        preset=options.preset,
        micro_batch=options.micro_batch,
        precision=options.precision,
        compiled=options.compile,
        rounds=options.rounds,
        log=log,
    )


def _overhead_arguments(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser)
    _add_job(parser, "bench.yaml")


def _overhead(options: argparse.Namespace) -> Mapping[str, Any]:
    from tokendrop.bench.overhead import bench_overhead

    return bench_overhead(options.job, rounds=options.rounds, log=log)


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    _overhead_arguments(parser)
    add_overrides(parser)


def _data(options: argparse.Namespace) -> Mapping[str, Any]:
    from tokendrop.bench.data import bench_data

    return bench_data(options.job, options.overrides, rounds=options.rounds, log=log)


def _images_arguments(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser)
    parser.add_argument("--images", type=whole(16), default=1024, help="small images of one turn (default 1024)")


def _images(options: argparse.Namespace) -> Mapping[str, Any]:
    from tokendrop.bench.images import bench_images

    return bench_images(rounds=options.rounds, images=options.images, log=log)


def _elastic_arguments(parser: argparse.ArgumentParser) -> None:
    _add_job(parser, "elastic.yaml")
    add_overrides(parser)
    within = "times the hours of the run of one size that the run by plan may take (default 1.35)"
    parser.add_argument("--within", type=number(1, 100), default=1.35, help=within)
    parser.add_argument("--resizes", type=whole(1), default=20, help="changes of workers (default 20)")
    parser.add_argument("--stretch", type=whole(1), default=30, help="steps between two of them (default 30)")
    parser.add_argument("--brief", action="store_true", help="no more than what the plan saves: some 12 minutes")
    parser.add_argument("--picture", type=path, metavar="FILE", help="draw its first run, as .svg or .png")


def _elastic(options: argparse.Namespace) -> Mapping[str, Any]:
    picture: Path | None = options.picture
    if picture is not None and (picture.suffix not in (".svg", ".png") or not picture.absolute().parent.is_dir()):
        raise UserError(f"--picture {picture}: want an .svg or a .png file in a folder that exists")
    from tokendrop.bench.elastic import bench_elastic

    return bench_elastic(
        options.job,
        options.overrides,
        within=options.within,
        resizes=options.resizes,
        stretch=options.stretch,
        brief=options.brief,
        picture=picture,
        log=log,
    )


def _workers_arguments(parser: argparse.ArgumentParser) -> None:
    default = Path("jobs", "paper", "gpt3_1.3b_ltd.yaml")
    parser.add_argument("--job", type=path, default=default, help=f"job file (default {default})")
    add_overrides(parser)
    parser.add_argument("--workers", type=whole(2), default=1024, help="workers to make up (default 1024)")
    parser.add_argument("--steps", type=whole(10), default=2000, help="steps that they record (default 2000)")


def _workers(options: argparse.Namespace) -> Mapping[str, Any]:
    if options.workers % 2:
        raise UserError(f"--workers {options.workers}: want an even number, for half of them train now and then")
    from tokendrop.bench.workers import bench_workers

    return bench_workers(options.job, options.overrides, workers=options.workers, steps=options.steps, log=log)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser)
    parser.add_argument("--task-data", type=path, required=True, metavar="DIR", help="documents as TASK/SPLIT.jsonl")
    parser.add_argument("--tokenizer", type=path, required=True, metavar="FILE", help="a tokenizer.json")
    presets = [name for name, kind in PRESETS.items() if kind == "gpt"]
    parser.add_argument("--preset", choices=presets, default="gpt-30m", help="model (default gpt-30m)")
    parser.add_argument("--tasks", metavar="A,B", help="tasks of lm-eval (default: all that have documents)")
    parser.add_argument("--limit", type=whole(1), default=20, help="documents of each task (default 20)")


def _evaluate(options: argparse.Namespace) -> Mapping[str, Any]:
    from tokendrop.bench.evaluate import bench_evaluate

    return bench_evaluate(
        options.task_data,
        options.tokenizer,
        preset=options.preset,
        tasks=[task.strip() for task in (options.tasks or "").split(",") if task.strip()],
        limit=options.limit,
        rounds=options.rounds,
        log=log,
    )


GROUP = Group(
    "bench",
    "Measure, side by side in one run: step time by kept length, the platform, data, elasticity, evaluation.",
    (
        Command(
            "bench step",
            partial(run, _step),
            _step_arguments,
            about="Time training steps by kept length, on this device; needs torch alone.",
            example="tokendrop bench step --rounds 9",
        ),
        device.COMMAND,
        Command(
            "bench overhead",
            partial(run, _overhead),
            _overhead_arguments,
            about="Time the platform's tokens per second against those of a bare loop.",
            example="tokendrop bench overhead --rounds 5",
        ),
        Command(
            "bench data",
            partial(run, _data),
            _data_arguments,
            about="Time preparing and reading samples, beside other libraries that are installed.",
            example="tokendrop bench data --rounds 5",
            extra="bench",
        ),
        Command(
            "bench images",
            partial(run, _images),
            _images_arguments,
            about="Time reading and changing images on one core, beside torchvision's own transforms.",
            example="tokendrop bench images --rounds 5",
            extra="vision",
        ),
        Command(
            "bench elastic",
            partial(run, _elastic),
            _elastic_arguments,
            about="Time changes and losses of workers, and worker-seconds against a fixed number of them.",
            example="tokendrop bench elastic --resizes 4 --picture run.svg",
            extra="bench",
        ),
        Command(
            "bench workers",
            partial(run, _workers),
            _workers_arguments,
            about="Time the platform's own classes under the load of very many workers, none of which is there.",
            example="tokendrop bench workers --workers 1024",
        ),
        Command(
            "bench evaluate",
            partial(run, _evaluate),
            _evaluate_arguments,
            about="Time lm-eval's tasks through our adapter, beside lm-eval's own for Hugging Face.",
            example="tokendrop bench evaluate --task-data eval --tokenizer tokenizer.json --rounds 3",
            extra="eval",
        ),
    ),
)
