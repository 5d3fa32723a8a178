"""Tables of a sweep: its trials before they start, its arms once they have ended."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from statistics import fmean
from typing import Any

from tokendrop.output import count, decimals, table
from tokendrop.schedule.scaling import estimate
from tokendrop.study.arms import Arm, best_of, worse_than_best
from tokendrop.study.budget import BUDGET, Measure, cost_of
from tokendrop.study.frontier import Frontier, frontiers
from tokendrop.study.progress import Progress
from tokendrop.study.sweep import SweepConfig
from tokendrop.study.trials import Trial, point_text, value_text
from tokendrop.study.verdict import Verdict, Worse, judged, metric_of

_MOST_ROWS = 60


def dry_result(sweep: SweepConfig, trials: Sequence[Trial]) -> dict[str, Any]:
    """What the trials would be, as scripts read it."""
    rows = [{**_identity(trial), **_cost(trial)} for trial in trials]
    totals = {key: sum(row[key] for row in rows) for key in _cost_keys(rows)}
    return {"name": sweep.name, "trials": rows, "total": totals}


def _identity(trial: Trial) -> dict[str, Any]:
    return {"run": trial.run, "values": dict(trial.point), "seed": trial.config.seed}


def _cost(trial: Trial) -> dict[str, Any]:
    """What a trial takes by its plan; nothing where its corpus has to be prepared first."""
    plan, profile = trial.plan, trial.config.scaling.profile
    if plan is None:
        return {}
    figures = {"steps": plan.steps, "layer_tokens": plan.layer_tokens(plan.steps), "flops": plan.flops(plan.steps)}
    if profile is None:
        return figures
    takes = estimate(plan, profile, trial.config.checkpoint_steps)
    return {**figures, "wall_clock_s": takes.wall_clock_s, "gpu_hours": takes.gpu_hours}


def _cost_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The costs that every trial has."""
    return [key for key in rows[0] if key not in ("run", "values", "seed") and all(key in row for row in rows)]


def dry_text(sweep: SweepConfig, trials: Sequence[Trial]) -> str:
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
    if sweep.budget is not None and keys:
        text += "\n\n" + _budget_text(sweep.budget.equal, trials)
    if sweep.searcher is not None:
        seeds = sweep.most_trials // sweep.searcher.arms
        text += (
            f"\n\nThe base job, once: optuna chooses {sweep.searcher.arms} arms of {seeds} seeds as they end,"
            f" {sweep.most_trials:,} trials at most."
        )
    if not keys:
        text += "\n\nA length in epochs: what the trials take is known once their corpus is prepared."
    return text


def _budget_text(measure: Measure, trials: Sequence[Trial]) -> str:
    """How equal runs of one budget are."""
    costs: dict[object, list[float]] = {}
    for trial in trials:
        costs.setdefault(dict(trial.point).get(BUDGET), []).append(cost_of(trial.config, measure))
    apart = max(1 - min(one) / max(one) for one in costs.values())
    return f"Lengths by budget: equal {measure.replace('_', ' ')}, at most {apart:.2%} apart."


def _cost_cell(key: str, value: float) -> str:
    if key == "wall_clock_s":
        return decimals(value / 3600)
    return decimals(value) if key == "gpu_hours" else count(value)


def _axes(trials: Sequence[Trial]) -> list[str]:
    return [*dict.fromkeys(key for trial in trials for key, _ in trial.point)]


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a dotted key where no other key ends so."""
    last = key.rpartition(".")[2]
    return last if sum(one.rpartition(".")[2] == last for one in keys) == 1 else key


def _point_cells(one: Trial | Arm, axes: Sequence[str]) -> list[str]:
    values = dict(one.point)
    return [value_text(values[axis]) if axis in values else "" for axis in axes]


def _some(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= _MOST_ROWS:
        return rows
    half = _MOST_ROWS // 2
    return [*rows[:half], [f"... {len(rows) - 2 * half:,} more", *("" for _ in rows[0][1:])], *rows[-half:]]


def result_of(
    sweep: SweepConfig,
    trials: Sequence[Trial],
    arms: Sequence[Arm],
    progress: Progress,
) -> dict[str, Any]:
    """What a sweep came to, as scripts read it."""
    best = best_of(sweep, arms)
    return {
        "name": sweep.name,
        "metric": sweep.metric,
        "direction": "min" if sweep.lower_is_better else "max",
        "aggregate": sweep.aggregate,
        "best": None if best is None else arms.index(best),
        "arms": [_arm_row(sweep, arm, best, progress) for arm in arms],
        "trials": [
            {
                **_identity(trial),
                "summary": progress.summaries.get(trial.run),
                "failure": progress.failures.get(trial.run),
                "stopped_early": progress.stopped.get(trial.run),
            }
            for trial in trials
        ],
        "verdict": asdict(said) if (said := _verdict(sweep, progress)) else None,
        "frontiers": [
            {**asdict(one), "point": dict(one.point)} for one in (frontiers(arms) if _has_budgets(sweep) else [])
        ],
    }


def _arm_row(sweep: SweepConfig, arm: Arm, best: Arm | None, progress: Progress) -> dict[str, Any]:
    worse = worse_than_best(sweep, arm, best)
    done = {str(trial.config.seed): progress.summaries.get(trial.run) for trial in arm.trials}
    return {
        "values": dict(arm.point),
        "value": arm.value,
        "std": arm.spread,
        "worse": None if worse is None else asdict(worse),
        "by_seed": {seed: summary.get(sweep.metric) for seed, summary in done.items() if summary},
        "seeds": len(arm.trials),
    }


def result_text(
    sweep: SweepConfig,
    arms: Sequence[Arm],
    progress: Progress,
) -> str:
    """What a sweep came to, as people read it: the best arm first."""
    best, summaries = best_of(sweep, arms), progress.summaries
    axes = [*dict.fromkeys(key for arm in arms for key, _ in arm.point)]
    header = ["arm", *(_short(axis, axes) for axis in axes), "seeds", f"{sweep.metric}, {sweep.aggregate}"]
    worse_of = ["worse by (95%)"] if sweep.aggregate == "mean" else []
    header += ["std", "min to max", *worse_of, "layer tokens", "FLOPs", "training time"]
    order = sorted(range(len(arms)), key=lambda number: _rank(sweep, arms[number]))
    worse = [[_worse_cell(worse_than_best(sweep, arm, best)) for _ in worse_of] for arm in arms]
    rows = [
        [str(number + 1), *_point_cells(arms[number], axes), *_arm_cells(arms[number], worse[number], summaries)]
        for number in order
    ]
    text = table(header, _some(rows))
    if best is not None and len(arms) > 1:
        text += f"\n\nbest: arm {arms.index(best) + 1}, by the {sweep.aggregate} of {sweep.metric} over its seeds"
    text += _frontier_text(sweep, arms) + _verdict_text(sweep, progress)
    if progress.stopped:
        text += f"\nstopped early: {len(progress.stopped)} trials; their arms are not compared"
    for run in (trial.run for arm in arms for trial in arm.trials if trial.run in summaries):
        if not isfinite(found := metric_of(summaries[run], sweep.metric)):
            text += f"\nnot finite: {run}: {sweep.metric} is {found:g}; its arm is not compared"
    for run, reason in progress.failures.items():
        text += f"\nfailed: {run}: {reason}"
    if progress.failures:
        text += "\nArms with failed trials are not compared; --retry-failed tries those again."
    return text


def _rank(sweep: SweepConfig, arm: Arm) -> tuple[bool, float]:
    value = 0.0 if arm.value is None else arm.value
    return not arm.is_whole or arm.value is None, value if sweep.lower_is_better else -value


def _worse_cell(worse: Worse | None) -> str:
    if worse is None:
        return ""
    interval = "" if worse.low is None else f" ({worse.low:.3g} to {worse.high:.3g})"
    return f"{worse.mean:.3g}{interval}"


def _arm_cells(arm: Arm, worse: list[str], summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    seeds = f"{len(arm.values)}" if arm.is_whole else f"{len(arm.values)} of {len(arm.trials)}"
    done = [summaries[trial.run] for trial in arm.trials if trial.run in summaries]
    found = ["", "", ""]
    if arm.value is not None:
        spread = "" if arm.spread is None else f"{arm.spread:.2g}"
        found = [f"{arm.value:.4g}", spread, f"{min(arm.values):.4g} to {max(arm.values):.4g}"]
    costs = ["", "", ""]
    if done:
        tokens, flops, took_s = (fmean(one[key] for one in done) for key in ("layer_tokens", "flops", "wall_clock_s"))
        costs = [count(tokens), count(flops), f"{took_s:,.1f} s"]
    return [seeds, *found, *worse, *costs]


def _has_budgets(sweep: SweepConfig) -> bool:
    return sweep.budget is not None and len(sweep.budget.amounts) > 1


def _frontier_text(sweep: SweepConfig, arms: Sequence[Arm]) -> str:
    if sweep.budget is None or not _has_budgets(sweep):
        return ""
    lines = [_law_text(one, sweep.metric, sweep.budget.equal) for one in frontiers(arms)]
    return "\n\n" + "\n".join(lines)


def _law_text(one: Frontier, metric: str, measure: str) -> str:
    name = point_text(one.point) or "all"
    if one.law is None:
        above = sum(value > 0 for value in one.values)
        return (
            f"{name}: no power law: a {metric} above 0 at {above} of {len(one.values)} budgets, want all and at least 3"
        )
    law = one.law
    fitted = f"{metric} = {law.factor:.4g} x {measure}^{law.exponent:.3f}"
    return f"{name}: {fitted}, exponent {law.low:.3f} to {law.high:.3f} (95%)"


def _verdict(sweep: SweepConfig, progress: Progress) -> Verdict | None:
    if sweep.claim is None:
        return None
    trials, lower = [*progress.trials.values()], sweep.lower_is_better
    return judged(sweep.claim, trials, progress.summaries, sweep.metric, lower=lower)


def _verdict_text(sweep: SweepConfig, progress: Progress) -> str:
    if (claim := sweep.claim) is None:
        return ""
    said, text = _verdict(sweep, progress), f"\n\nclaim: {claim.text}" if claim.text else "\n"
    if said is None:
        return f"{text}\nverdict: open, for want of two seeds of both arms"
    if not isfinite(said.spread):
        return f"{text}\nverdict: undecided, for {sweep.metric} is not finite in every seed of both arms"
    found = f"{said.answer}; worse by {said.mean:.4g} of {sweep.metric} (95%: {said.low:.4g} to {said.high:.4g},"
    text += f"\nverdict: {found} {said.seeds} seeds in pairs), margin {claim.margin:g}"
    if said.answer == "undecided":
        more = f"some {said.seeds_to_decide:,}" if said.seeds_to_decide else "no number of"
        text += f"; {more} seeds would decide, if they go on like this"
    return text
