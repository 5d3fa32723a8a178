"""`tokendrop sweep`: many runs of one job with some of its keys varied, and which of them is best."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokendrop.cli.arguments import path
from tokendrop.cli.command import Command, Outcome
from tokendrop.errors import UserError
from tokendrop.output import count, table
from tokendrop.schedule.scaling import estimate

if TYPE_CHECKING:
    from tokendrop.study.arms import Arm
    from tokendrop.study.sweep import SweepConfig
    from tokendrop.study.trials import Trial

_MOST_ROWS = 60
_EXPLAIN = "explain"


def arguments(parser: argparse.ArgumentParser) -> None:
    """SWEEP and its overrides; or two trials to explain."""
    parser.add_argument("sweep", type=path, help="sweep file (YAML); or `explain`, before two trials")
    help = "key=value overrides of the base job; after `explain`, two run folders of trials, or job files"
    parser.add_argument("overrides", nargs="*", default=[], help=help)
    parser.add_argument("--dry-run", action="store_true", help="print the trials and what they cost; start nothing")
    parser.add_argument("--retry-failed", action="store_true", help="try those again that failed in an earlier start")
    parser.add_argument("--yes", action="store_true", help="start more than a thousand trials")


def run(options: argparse.Namespace) -> Outcome:
    """Train the trials of a sweep that are not trained yet; or plan them; or explain two of them.

    Raises:
        UserError: something is wrong with the sweep, or with a job of it.
    """
    if str(options.sweep) == _EXPLAIN:
        return explain(options.overrides)
    for text in options.overrides:
        if "=" not in text:
            raise UserError(f"sweep: want key=value after the sweep file, got {text!r}")
    from tokendrop.study.sweep import load_sweep
    from tokendrop.study.trials import expand

    sweep = load_sweep(options.sweep)
    trials = expand(sweep, options.sweep, options.overrides, many=options.yes)
    if options.dry_run:
        return Outcome(dry_result(sweep, trials), dry_text(sweep, trials))
    summaries, failures = trained(sweep, trials, options)
    from tokendrop.study.arms import arms_of

    arms = arms_of(sweep, trials, summaries)
    return Outcome(
        result_of(sweep, trials, arms, summaries, failures),
        result_text(sweep, arms, summaries, failures),
        exit_code=1 if failures else 0,
    )


def trained(
    sweep: "SweepConfig", trials: Sequence["Trial"], options: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Summaries of the trials, and why some failed, by name of their run folders."""
    import ray

    from tokendrop.launch.stopping import stopping_in_time
    from tokendrop.study.run import run_sweep

    try:
        with stopping_in_time():
            return run_sweep(sweep, trials, path=options.sweep, retry_failed=options.retry_failed)
    except KeyboardInterrupt:
        ray.shutdown()
        raise


def dry_result(sweep: "SweepConfig", trials: Sequence["Trial"]) -> dict[str, Any]:
    """What the trials would be, as scripts read it."""
    rows = [{**_identity(trial), **_cost(trial)} for trial in trials]
    totals = {key: sum(row[key] for row in rows) for key in _cost_keys(rows)}
    return {"name": sweep.name, "trials": rows, "total": totals}


def _identity(trial: "Trial") -> dict[str, Any]:
    return {"run": trial.run, "values": dict(trial.point), "seed": trial.config.seed}


def _cost(trial: "Trial") -> dict[str, Any]:
    """What a trial takes by its plan; nothing where its corpus has to be prepared first."""
    plan, profile = trial.plan, trial.config.scaling.profile
    if plan is None:
        return {}
    figures = {"steps": plan.steps, "layer_tokens": plan.layer_tokens(plan.steps), "flops": plan.flops(plan.steps)}
    if profile is None:
        return figures
    takes = estimate(plan, profile)
    return {**figures, "wall_clock_s": takes.wall_clock_s, "gpu_hours": takes.gpu_hours}


def _cost_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The costs that every trial has."""
    return [key for key in rows[0] if key not in ("run", "values", "seed") and all(key in row for row in rows)]


def dry_text(sweep: "SweepConfig", trials: Sequence["Trial"]) -> str:
    """What the trials would be, as people read it."""
    rows = [{**_identity(trial), **_cost(trial)} for trial in trials]
    names = {"steps": "steps", "layer_tokens": "layer tokens", "flops": "FLOPs"}
    names |= {"wall_clock_s": "hours", "gpu_hours": "GPU-hours"}
    keys = _cost_keys(rows)
    axes = _axes(trials)
    lines = [
        [row["run"], *_point_cells(trial, axes), str(row["seed"]), *(_cost_cell(key, row[key]) for key in keys)]
        for trial, row in zip(trials, rows, strict=True)
    ]
    total = [f"{len(trials)} trials", *("" for _ in axes), "", *(_cost_cell(k, sum(r[k] for r in rows)) for k in keys)]
    header = ["trial", *(_short(axis, axes) for axis in axes), "seed", *(names[key] for key in keys)]
    text = table(header, [*_some(lines), total])
    if not keys:
        text += "\n\nA length in epochs: what the trials take is known once their corpus is prepared."
    return text


def _cost_cell(key: str, value: float) -> str:
    if key == "wall_clock_s":
        return f"{value / 3600:,.2f}"
    return f"{value:,.2f}" if key == "gpu_hours" else count(value)


def _axes(trials: Sequence["Trial"]) -> list[str]:
    return [*dict.fromkeys(key for trial in trials for key, _ in trial.point)]


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a dotted key where no other key ends so."""
    last = key.rpartition(".")[2]
    return last if sum(one.rpartition(".")[2] == last for one in keys) == 1 else key


def _point_cells(one: "Trial | Arm", axes: Sequence[str]) -> list[str]:
    from tokendrop.study.trials import value_text

    values = dict(one.point)
    return [value_text(values[axis]) if axis in values else "" for axis in axes]


def _some(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= _MOST_ROWS:
        return rows
    half = _MOST_ROWS // 2
    return [*rows[:half], [f"... {len(rows) - 2 * half:,} more", *("" for _ in rows[0][1:])], *rows[-half:]]


def result_of(
    sweep: "SweepConfig",
    trials: Sequence["Trial"],
    arms: Sequence["Arm"],
    summaries: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    """What a sweep came to, as scripts read it."""
    from tokendrop.study.arms import best_of

    best = best_of(sweep, arms)
    return {
        "name": sweep.name,
        "metric": sweep.metric,
        "direction": "min" if sweep.lower_is_better else "max",
        "aggregate": sweep.aggregate,
        "best": None if best is None else arms.index(best),
        "arms": [
            {
                "values": dict(arm.point),
                "value": arm.value,
                "std": arm.spread,
                "by_seed": {
                    str(trial.config.seed): summaries[trial.run][sweep.metric]
                    for trial in arm.trials
                    if trial.run in summaries
                },
                "seeds": len(arm.trials),
            }
            for arm in arms
        ],
        "trials": [
            {**_identity(trial), "summary": summaries.get(trial.run), "failure": failures.get(trial.run)}
            for trial in trials
        ],
    }


def result_text(
    sweep: "SweepConfig",
    arms: Sequence["Arm"],
    summaries: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, str],
) -> str:
    """What a sweep came to, as people read it: the best arm first."""
    from tokendrop.study.arms import best_of

    best = best_of(sweep, arms)
    axes = [*dict.fromkeys(key for arm in arms for key, _ in arm.point)]
    header = ["arm", *(_short(axis, axes) for axis in axes), "seeds", f"{sweep.metric}, {sweep.aggregate}"]
    header += ["std", "min to max", "layer tokens", "FLOPs", "training time"]
    order = sorted(range(len(arms)), key=lambda number: _rank(sweep, arms[number]))
    rows = [
        [str(number + 1), *_point_cells(arms[number], axes), *_arm_cells(arms[number], summaries)] for number in order
    ]
    text = table(header, _some(rows))
    if best is not None and len(arms) > 1:
        text += f"\n\nbest: arm {arms.index(best) + 1}, by the {sweep.aggregate} of {sweep.metric} over its seeds"
    for run, reason in failures.items():
        text += f"\nfailed: {run}: {reason}"
    if failures:
        text += "\nArms with failed trials are not compared; --retry-failed tries those again."
    return text


def _rank(sweep: "SweepConfig", arm: "Arm") -> tuple[bool, float]:
    value = 0.0 if arm.value is None else arm.value
    return not arm.is_whole or arm.value is None, value if sweep.lower_is_better else -value


def _arm_cells(arm: "Arm", summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    seeds = f"{len(arm.values)}" if arm.is_whole else f"{len(arm.values)} of {len(arm.trials)}"
    done = [summaries[trial.run] for trial in arm.trials if trial.run in summaries]
    if arm.value is None:
        return [seeds, "", "", "", "", "", ""]
    return [
        seeds,
        f"{arm.value:.4g}",
        "" if arm.spread is None else f"{arm.spread:.2g}",
        f"{min(arm.values):.4g} to {max(arm.values):.4g}",
        count(done[0]["layer_tokens"]),
        count(done[0]["flops"]),
        f"{sum(one['wall_clock_s'] for one in done) / len(done):,.1f} s",
    ]


def explain(places: Sequence[str]) -> Outcome:
    """Which keys make two trials different runs.

    Raises:
        UserError: they are not two, or one of them is no trial.
    """
    if len(places) != 2:
        raise UserError(f"sweep explain: want two trials, such as runs/trial-1 runs/trial-2; got {len(places)}")
    from tokendrop.study.identity import differences, run_name
    from tokendrop.study.record import settings_at

    one, other = (settings_at(path(place)) for place in places)
    found = differences(one, other)
    result = {"runs": [run_name(one), run_name(other)], "differences": {key: [*both] for key, both in found.items()}}
    if not found:
        return Outcome(result, "the same run: every key that decides what is trained has the same value in both")
    rows = [[key, *("-" if value is None else value for value in both)] for key, both in found.items()]
    return Outcome(result, table(["key", *(Path(place).name for place in places)], rows))


COMMAND = Command(
    "sweep",
    run,
    arguments,
    about="Train many runs of a job with some of its keys varied, by Ray Tune, and print which are best.",
    more="A trial is a run, named by what it trains: a sweep that is started again goes on, and trains nothing twice.",
    example="tokendrop sweep jobs/sweeps/start_length.yaml --dry-run",
)
