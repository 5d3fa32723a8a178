"""What the page says in words and tables."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokendrop.config.load import dump_job
from tokendrop.output import count
from tokendrop.report.arms import Arm, Difference, difference, reference
from tokendrop.report.curves import Rows, speeds_of, thinned
from tokendrop.train.trace_summary import read_summary

_MOST_ROWS = 20  # of the table below a chart


def sentences(arms: Sequence[Arm]) -> list[str]:
    """What was run, what came out, what it saved; a sentence each."""
    base, config = reference(arms), arms[0].config
    runs, model = sum(len(arm.runs) for arm in arms), config.model
    jobs = f"{len(arms)} arms" if len(arms) > 1 else f"one arm, {arms[0].label}"
    run = (
        f"{runs} run{'s' * (runs != 1)} of {jobs}: a {model.kind.upper()} of {model.layers} layers, width {model.width}"
        f" and sequence length {model.sequence_length}"
        f"{'' if all(arm.config.model == model for arm in arms) else ', and others'}, planned for"
        f" {_range_of_steps(arms)} steps of {count(config.tokens_per_step)} tokens."
    )
    return [run, _outcome(arms, base), _saved(arms, base)]


def _range_of_steps(arms: Sequence[Arm]) -> str:
    steps = sorted({arm.config.steps for arm in arms})
    return f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"


def _outcome(arms: Sequence[Arm], base: Arm) -> str:
    losses = {arm.label: float(np.mean([*found.values()])) for arm in arms if (found := arm.last_losses())}
    if not losses:
        return "No run is complete and has a validation loss."
    best = min(losses, key=lambda label: losses[label])
    others = [arm for arm in arms if arm is not base and arm.label in losses]
    if base.label not in losses or not others:
        return f"The last validation loss of {best} is {losses[best]:.3f}" + (
            ", the lowest." if len(losses) > 1 else "."
        )
    shown = others[0] if len(others) == 1 else next((arm for arm in others if arm.label == best), others[0])
    found = difference(shown, base)
    assert found is not None
    side = "higher" if found.mean > 0 else "lower"
    lowest = "" if len(others) == 1 else f"; {best} has the lowest of all {len(losses)}"
    return (
        f"{shown.label} ended at a validation loss of {losses[shown.label]:.3f}, {abs(found.mean):.3f} {side} than"
        f" {base.label} at {losses[base.label]:.3f} ({_interval(found)}){lowest}."
    )


def _interval(found: Difference) -> str:
    return found.how if found.low is None else f"95% interval of the difference {_bounds(found)}"


def _bounds(found: Difference) -> str:
    return found.how if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}; {found.how}"


def _less(amount: float, saving: float) -> str:
    return f"{count(amount)} ({-saving:+.1%})" if saving else count(amount)


def _saved(arms: Sequence[Arm], base: Arm) -> str:
    others = [arm for arm in arms if arm is not base and arm.config.plan.layer_token_saving() > 0]
    if not others:
        return "No arm but the first saves layer tokens by its plan." if len(arms) > 1 else _alone(arms[0])
    most = max(others, key=lambda arm: arm.config.plan.layer_token_saving())
    plan = most.config.plan
    text = (
        f"{most.label} saves {plan.layer_token_saving():.1%} of the layer tokens and {plan.flops_saving():.1%} of the"
        f" FLOPs by plan"
    )
    if most.config.steps != base.config.steps or not (most.is_complete and base.is_complete):
        return f"{text}; its training time is not compared, for its steps are not those of {base.label}."
    change = most.seconds() / base.seconds() - 1
    return f"{text}; its training time was {abs(change):.1%} {'shorter' if change < 0 else 'longer'} as measured."


def _alone(arm: Arm) -> str:
    saved, flops = arm.config.plan.layer_token_saving(), arm.config.plan.flops_saving()
    return f"By plan it saves {saved:.1%} of the layer tokens and {flops:.1%} of the FLOPs."


def savings_table(arms: Sequence[Arm]) -> dict[str, Any]:
    """What each arm came to, and saves: by plan against its own full length, in time against the reference."""
    base = reference(arms)
    header = [
        "arm",
        "seeds",
        "validation loss",
        f"loss above {base.label}",
        "95% interval",
        "layer tokens, by plan",
        "FLOPs, by plan",
    ]
    header += ["training time", "tokens a second"]
    return {"header": header, "rows": [_savings(arm, base) for arm in arms], "base": base.label}


def _savings(arm: Arm, base: Arm) -> list[str]:
    plan, losses = arm.config.plan, [*arm.last_losses().values()]
    loss = f"{np.mean(losses):.3f}" if losses else "-"
    if len(losses) > 1:
        loss += f" ({min(losses):.3f} to {max(losses):.3f})"
    found = None if arm is base else difference(arm, base)
    above = "" if arm is base else "-" if found is None else f"{found.mean:+.3f}"
    time = f"{arm.seconds():,.1f} s"
    if arm is not base and arm.is_complete and base.is_complete and plan.steps == base.config.steps:
        time += f" ({arm.seconds() / base.seconds() - 1:+.1%})"
    elif not arm.is_complete:
        time += " (not complete)"
    speeds = np.concatenate([speeds_of(run.steps) for run in arm.runs])
    low, middle, high = np.quantile(speeds[np.isfinite(speeds)], [0.1, 0.5, 0.9]) if len(speeds) else (0, 0, 0)
    seeds = ", ".join(str(seed) for seed in sorted({run.config.seed for run in arm.runs}))
    return [
        arm.label,
        seeds if len(seeds) <= 30 else f"{len(arm.runs)} runs",
        loss,
        above,
        "" if found is None else _bounds(found),
        _less(plan.layer_tokens(plan.steps), plan.layer_token_saving()),
        _less(plan.flops(plan.steps), plan.flops_saving()),
        time,
        f"{middle:,.0f} ({low:,.0f} to {high:,.0f})",
    ]


def profile_table(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Where the time of traced steps went, by arm, of its longest run; None where none was traced."""
    found = {arm.label: summary for arm in arms if (summary := read_summary(arm.longest.folder))}
    if not found:
        return None
    parts = list(dict.fromkeys(part for summary in found.values() for part in _parts_s(summary)))
    header = ["arm", "steps", "workers", "seconds a step", *parts]
    return {"header": header, "rows": [[label, *_profiled(summary, parts)] for label, summary in found.items()]}


def _parts_s(summary: Mapping[str, Any]) -> dict[str, float]:
    return {**summary["phases_s"], **{f"{part} (within)": value for part, value in summary["within_s"].items()}}


def _profiled(summary: Mapping[str, Any], parts: Sequence[str]) -> list[str]:
    step_s, of_part = summary["step_s"], _parts_s(summary)
    steps = f"{summary['first_step']:,} to {summary['last_step']:,}"
    shares = [f"{of_part[part] / step_s:.1%}" if part in of_part else "" for part in parts]
    return [steps, str(summary["world_size"]), f"{step_s:.4g}", *shares]


def curve_table(rows: Rows, x: str, y: str, labels: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The data of a chart, an arm a column; some rows of it, the first and the last among them."""
    found: dict[Any, dict[str, str]] = {}
    for row in rows:
        if row.get(y) is not None:
            found.setdefault(row[x], {})[row["arm"]] = f"{row[y]:,.6g}" if abs(row[y]) >= 1e-3 else f"{row[y]:.3g}"
    places = [*found] if x == "part" else sorted(found)
    if x in ("flops", "seconds", "layer_tokens") and len(labels) > 1 and len(places) > _MOST_ROWS:
        pick = {place for label in labels for place in _of_arm(found, places, label, _MOST_ROWS // 2)}
        shown = [place for place in places if place in pick]
    else:
        shown = [places[at] for at in thinned(len(places), _MOST_ROWS)]
    cells = [[_place(place), *(found[place].get(label, "") for label in labels)] for place in shown]
    return [x.replace("_", " "), *labels], cells


def _of_arm(found: Mapping[Any, Mapping[str, str]], places: Sequence[Any], label: str, most: int) -> list[Any]:
    own = [place for place in places if label in found[place]]
    return [own[at] for at in thinned(len(own), most)]


def _place(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}" if abs(value) < 1e6 else count(value)


def again(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """How to make each arm again."""
    return [_again(arm) for arm in arms]


def _again(arm: Arm) -> dict[str, Any]:
    run = arm.longest
    environment, job = run.environment, run.folder / "job.yaml"
    workers = environment.get("workers") or environment
    packages = {name: version for name, version in (workers.get("packages") or {}).items() if version}
    device = (workers.get("device") or {}).get("name") or workers.get("machine")
    facts = [
        ("commit", environment.get("commit") or "not known"),
        ("Python", workers.get("python")),
        ("device", device),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("runs", ", ".join(str(one.folder) for one in arm.runs)),
    ]
    train, lineage = ["tokendrop", "train", str(job)], run.lineage
    if lineage is not None:
        train = ["tokendrop", "fork", lineage.parent, "--at", str(lineage.step), *lineage.overrides]
    return {
        "label": arm.label,
        "command": shlex.join(train),
        "facts": [[name, str(value)] for name, value in facts if value],
        "job": dump_job(run.config),
    }
