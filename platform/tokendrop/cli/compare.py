"""`tokendrop compare`: several runs, and what each saves against the first."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokendrop.cli.arguments import job_file
from tokendrop.cli.command import Command, Outcome
from tokendrop.cli.train import change, figure_names, job_to_train, run_figures, trained, where_to_look
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.output import progress_line, table

_AT_SCALE = (
    "A large model on a GPU nears the saving of the FLOPs: the paper measured 25.6% of the wall clock at 1.3B, with a"
    " third of the layer\ntokens saved. A small model on a CPU saves less time: its embedding, head, optimizer and"
    " data, and its first and last layer,\ncost the same however many tokens are dropped."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The jobs, and what is changed in all of them."""
    parser.add_argument("jobs", type=job_file, nargs="+", help="job files (YAML), the baseline first")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key in every job")


def run(options: argparse.Namespace) -> Outcome:
    """Train the jobs one after the other, then time their steps in turns.

    Raises:
        UserError: something is wrong with one of them.
    """
    configs = [job_to_train(job, options.set) for job in options.jobs]
    results = [trained(config) for config in configs]
    step_times, reason = step_times_of([_as_trained(*one) for one in zip(configs, results, strict=True)])
    names = [config.name for config in configs]
    text = comparison_text(results, names, step_times=step_times, not_timed=reason)
    return Outcome(
        {"runs": results, "step_time_over_first": step_times, "not_timed": reason},
        f"\n{text}\n{where_to_look(results, configs[0])}",
    )


def _as_trained(config: ExperimentConfig, result: Mapping[str, Any]) -> ExperimentConfig:
    """The job with what its run has found, where it could not be planned before."""
    from tokendrop.launch.initial import as_begun

    return as_begun(config, Path(result["run"])) if config.waits_for_epochs else config


def step_times_of(configs: Sequence[ExperimentConfig]) -> tuple[list[dict[str, Any]] | None, str | None]:
    """What each job's steps take over those of the first, timed in turns; None, and why, where that can't be."""
    from tokendrop.bench.side_by_side import time_side_by_side, why_not_timed

    if reason := why_not_timed(configs):
        return None, reason
    with progress_line("timing   the jobs' steps side by side:", "turns") as progress:
        return time_side_by_side(configs, progress), None


def comparison_text(
    results: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    step_times: Sequence[Mapping[str, Any]] | None,
    not_timed: str | None = None,
) -> str:
    """Runs side by side; savings are against the first.

    Args:
        step_times: of each run's steps over the first's, measured in turns; None where they were not,
        not_timed: for this reason.
    """
    times = [_spread_within(result) for result in results] if step_times is None else [*map(_saved, step_times)]
    times = times if step_times is None else ["", *times[1:]]
    figures = figure_names(results)
    rows = [
        [name, *run_figures(result, results[0], figures), time, f"{result['wall_clock_s']:.1f} s"]
        for name, result, time in zip(names, results, times, strict=True)
    ]
    step_time = "step time" if step_times is None else "step time, in turns"
    text = table(["run", *figures, "layer tokens", "FLOPs", step_time, "training time"], rows)
    if step_times is None:
        told = f"Step time: median of each run's own steps (10% to 90% of them); not measured in turns: {not_timed}."
    else:
        turns = step_times[0]["turns"]
        told = f"Step time, in turns: the jobs' steps timed side by side, median (least to most) of {turns} turns."
    told += "\nTraining time: one run after the other, with whatever else the machine did at that time."
    drops = any(result["layer_token_saving"] for result in results)
    return "\n\n".join([text, told, *([_AT_SCALE] if drops else [])])


def _saved(ratio: Mapping[str, Any]) -> str:
    return f"{change(ratio['median'])} ({ratio['min'] - 1:+.0%} to {ratio['max'] - 1:+.0%})"


def _spread_within(result: Mapping[str, Any]) -> str:
    median, low, high = (result["step_time_s"][key] for key in ("median", "p10", "p90"))
    return f"{median:.3g} s ({low:.3g} to {high:.3g})"


COMMAND = Command(
    "compare",
    run,
    arguments,
    about="Train several jobs, one after the other, time their steps in turns, and print what each saves.",
    example="tokendrop compare jobs/pretrain/quickstart_baseline.yaml jobs/pretrain/quickstart.yaml",
)
