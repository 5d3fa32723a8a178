"""`tokendrop plan`: a run before it starts, by the arithmetic of its job alone."""

import argparse
from dataclasses import asdict
from typing import Any

from tokendrop.cli import plan_simulated
from tokendrop.cli.command import Command, Outcome
from tokendrop.config.load import load_job
from tokendrop.output import count, decimals, table
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.kept_by_step import KeptByStep
from tokendrop.schedule.plan import RunPlan, Segment
from tokendrop.schedule.routes import stages
from tokendrop.schedule.scaling import Estimate, estimate

_MOST_ROWS, _MOST_RESIZES = 16, 8
_KEPT = {"tokens": "kept_lengths", "sequences": "kept_sequences"}


def run(options: argparse.Namespace) -> Outcome:
    """Plan a job.

    Raises:
        UserError: something is wrong with the job.
    """
    config = load_job(options.job, options.overrides)
    simulated = plan_simulated.run(config, options.simulate, options.seed)
    plan, fixed, profile = config.plan, config.fixed_plan, config.scaling.profile
    clock = config.clock
    bounds = {
        key: (one.always(clock, wants=False).resolve(clock), one.always(clock, wants=True).resolve(clock))
        for key, one in config.drop.adaptive.items()
    }
    result = plan_result(plan, fixed=fixed, profile=profile, checkpoint_steps=config.checkpoint_steps)
    return Outcome(
        {
            "name": config.name,
            "optimizer": config.train.groups,
            **({} if config.train.fp8 is None else {"fp8": config.train.fp8}),
            **result,
            **({"bounds": {key: _bounds_result(*both, plan.steps) for key, both in bounds.items()}} if bounds else {}),
            **simulated.result,
        },
        plan_text(
            config.name,
            plan,
            optimizer=config.train.groups,
            fp8=config.train.fp8,
            fixed=fixed,
            profile=profile,
            checkpoint_steps=config.checkpoint_steps,
        )
        + "".join(_bounds_text(key, *both, plan.steps) for key, both in bounds.items())
        + simulated.text,
    )


def _bounds_result(latest: KeptByStep, earliest: KeptByStep, steps: int) -> dict[str, list[dict[str, int]]]:
    """First steps and kept lengths of an adaptive schedule with the latest and with the earliest growth."""
    return {
        name: [{"start": start, "kept_length": kept} for start, _, (kept,) in stages([one], steps)]
        for name, one in (("latest", latest), ("earliest", earliest))
    }


def _bounds_text(key: str, latest: KeptByStep, earliest: KeptByStep, steps: int) -> str:
    said = [
        f"{name} growth that the budget allows: {_moves(one, steps)}"
        for name, one in (("the earliest", earliest), ("the latest", latest))
    ]
    return f"\n\ndrop.{key} is decided as the run goes; above is what is expected.\n" + "\n".join(said)


def _moves(kept: KeptByStep, steps: int) -> str:
    """Where a kept length begins to grow and ends."""
    found = [(start, kept) for start, _, (kept,) in stages([kept], steps)]
    if len(found) == 1:
        return f"{found[0][1]} tokens throughout"
    return f"{found[0][1]} tokens until step {found[1][0]:,}, {found[-1][1]} from step {found[-1][0]:,} on"


def plan_result(
    plan: RunPlan,
    *,
    fixed: RunPlan | None = None,
    profile: DeviceProfile | None = None,
    checkpoint_steps: int | None = None,
) -> dict[str, Any]:
    """A plan as scripts read it.

    Args:
        fixed: the same run at a fixed number of workers, and
        profile: its devices; with both, what each run takes, and
        checkpoint_steps: between two checkpoints; with them, what losses of nodes are expected to take is part of it.
    """
    return {
        "steps": plan.steps,
        "tokens": plan.steps * plan.tokens_per_step,
        "layer_tokens": plan.layer_tokens(plan.steps),
        "layer_tokens_full": plan.layer_tokens_full,
        "layer_token_saving": plan.layer_token_saving(),
        "dropped_layer_token_saving": plan.dropped_layer_token_saving(),
        "flops": plan.flops(plan.steps),
        "flops_full": plan.flops_full,
        "flops_saving": plan.flops_saving(),
        "lr_clock": plan.lr_clock,
        "lr_warmup": plan.learning_rate.warmup,
        "lr_decay": plan.learning_rate.decay_length,
        "lr_warmup_steps": plan.warmup_steps(),
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
        **({"group": plan.batch.group} if plan.batch.group > 1 else {}),
        "segments": [_segment_result(segment) for segment in plan.segments],
        "resizes": [{"step": step, "from": before, "to": after} for step, before, after in plan.resizes],
        **({} if fixed is None or profile is None else _bill(plan, fixed, profile, checkpoint_steps)),
    }


def _segment_result(segment: Segment) -> dict[str, Any]:
    return {
        "start": segment.start,
        "stop": segment.stop,
        "kept_length": segment.kept_length,
        **({} if segment.is_even else {_KEPT[segment.routes.counts]: segment.kept_by_layer}),
        "workers": segment.workers,
        "micro_batch": segment.micro_batch,
        "accumulation": segment.accumulation,
        "recomputes": segment.recomputes,
        **({} if segment.activation_bytes is None else {"activation_bytes": segment.activation_bytes}),
    }


def _bill(plan: RunPlan, fixed: RunPlan, profile: DeviceProfile, checkpoint_steps: int | None) -> dict[str, Any]:
    both = {"": estimate(plan, profile, checkpoint_steps), "_fixed": estimate(fixed, profile, checkpoint_steps)}
    figures = {f"{key}{of}": value for of, one in both.items() for key, value in asdict(one).items()}
    return {"profile": profile.name, "profile_kind": profile.kind, **figures}


def plan_text(
    name: str,
    plan: RunPlan,
    *,
    optimizer: str,
    fp8: str | None = None,
    fixed: RunPlan,
    profile: DeviceProfile | None = None,
    checkpoint_steps: int | None = None,
) -> str:
    """A plan as people read it; the last arguments as of `plan_result`."""
    rows = _segment_rows(plan)
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], [f"... {len(rows) - 2 * half} more", *[""] * (len(rows[0]) - 1)], *rows[-half:]]
    sizes = ["micro batch", "accumulation"] if _grows(plan) else ["accumulation"]
    kept = ["activations"] if _has_limit(plan) else []
    header = ["steps", "kept length", "workers", *sizes, *kept, "lr at the end", "saved by then"]
    facts = [*_facts(name, plan), *_recomputed(plan), ("optimizer", optimizer)]
    if fp8 is not None:
        facts.append(("fp8", f"matrix products of the layers, {fp8} scales; hours do not count what it saves"))
    facts += _scaling_facts(plan, fixed, profile, checkpoint_steps)
    return "\n".join(f"{key:<14} {value}" for key, value in facts) + "\n\n" + table(header, rows)


def _scaling_facts(
    plan: RunPlan, fixed: RunPlan, profile: DeviceProfile | None, checkpoint_steps: int | None
) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if plan.batch.group > 1:
        facts += [("groups", _groups(plan))]
    if plan.resizes:
        some = [f"{after} from step {step:,}" for step, _, after in plan.resizes[:_MOST_RESIZES]]
        more = len(plan.resizes) - len(some)
        facts += [("workers", ", ".join([f"{plan.at(0).workers}", *some, *([f"{more} more"] if more else [])]))]
    if profile is None:
        return facts
    now, then = (estimate(one, profile, checkpoint_steps) for one in (plan, fixed))
    losses = ", lost nodes among it" if profile.node_losses_per_hour and checkpoint_steps else ""
    facts += [("expected", f"{_taken(now)}   by {profile.name} ({profile.kind}){losses}")]
    if plan != fixed:
        facts += [("fixed size", f"{_taken(then)}   on {fixed.at(0).workers} workers")]
    return facts


def _groups(plan: RunPlan) -> str:
    """How workers train a micro batch together, and what each sends the others of its group."""
    segment, what = plan.segments[-1], "heads and MLPs" if plan.group_split == "layers" else "each layer's tokens"
    sequences = segment.micro_batch * plan.batch.sequences_per_sample
    sent = plan.group_share(segment).passes.bytes * sequences * (plan.batch.group - 1) / plan.batch.group
    return (
        f"of {plan.batch.group} workers, which share out {what}; each sends {count(int(sent))}B for a micro"
        f" batch of {sequences} x {segment.kept_length} tokens"
    )


def _taken(estimate: Estimate) -> str:
    hours = estimate.wall_clock_s / 3600
    time = f"{hours:,.1f} h" if hours >= 1 else f"{decimals(estimate.wall_clock_s)} s"
    cost = "" if estimate.cost is None else f", ${decimals(estimate.cost)}"
    return f"{time}, {decimals(estimate.gpu_hours)} GPU-hours{cost}"


def _facts(name: str, plan: RunPlan) -> list[tuple[str, str]]:
    shape, batch, rate = plan.shape, plan.batch, plan.learning_rate
    unit = "steps" if plan.lr_clock == "step" else "layer tokens"
    each = f"{batch.sequences_per_sample} x " if batch.sequences_per_sample > 1 else ""
    return [
        (
            "run",
            f"{name}: {plan.steps:,} steps of {batch.global_batch} x {each}{shape.sequence_length} tokens,"
            f" {count(plan.steps * plan.tokens_per_step)} tokens",
        ),
        ("layers", f"{shape.layers}, of which {len(plan.dropped_layers)} drop tokens"),
        (
            "layer tokens",
            f"{count(plan.layer_tokens(plan.steps))} of {count(plan.layer_tokens_full)}:"
            f" {plan.layer_token_saving():.2%} saved over all layers,"
            f" {plan.dropped_layer_token_saving():.2%} over the dropped ones",
        ),
        (
            "FLOPs",
            f"{count(plan.flops(plan.steps))} of {count(plan.flops_full)}: {plan.flops_saving():.2%} saved",
        ),
        (
            "learning rate",
            f"{rate.peak:g} -> {rate.final:g}, {rate.decay}; warm-up {count(rate.warmup)} {unit}"
            f" ({plan.warmup_steps():,} steps), decay {count(rate.decay_length)} {unit}",
        ),
    ]


def _recomputed(plan: RunPlan) -> list[tuple[str, str]]:
    """Where layers are computed again in the backward pass."""
    steps = sum(s.stop - s.start for s in plan.segments if s.recomputes)
    where = "" if steps == plan.steps else f" in {steps / plan.steps:.1%} of the steps"
    return (
        [("recomputed", f"all layers, in the backward pass{where}; neither FLOPs nor hours count it")] if steps else []
    )


def _has_limit(plan: RunPlan) -> bool:
    """Whether layers are computed again only where a micro batch would keep too much."""
    return any(segment.activation_bytes is not None for segment in plan.segments)


def _kept(segment: Segment) -> list[str]:
    """What autograd keeps of a micro batch, where that has a limit."""
    if segment.activation_bytes is None:
        return []
    return [f"{segment.activation_bytes / 1e9:.3g} GB{', recomputed' if segment.recomputes else ''}"]


def _grows(plan: RunPlan) -> bool:
    """Whether micro batches are larger anywhere than the job's."""
    return any(segment.micro_batch > plan.batch.micro_batch for segment in plan.segments)


def _segment_rows(plan: RunPlan) -> list[list[str]]:
    return [
        [
            f"{s.start:,}-{s.stop:,}",
            f"{s.kept_length}" + ("" if s.is_even else " on average"),
            f"{s.workers}",
            *([f"{s.micro_batch}"] if _grows(plan) else []),
            f"{s.accumulation}",
            *_kept(s),
            f"{plan.lr(s.stop - 1):.3g}",
            f"{1 - plan.layer_tokens(s.stop) / (plan.layer_tokens_full * s.stop / plan.steps):.1%}",
        ]
        for s in plan.segments
    ]


COMMAND = Command(
    "plan",
    run,
    plan_simulated.add_arguments,
    about="Print a run before it starts: segments, layer tokens, FLOPs, learning rate; with a profile, its cost.",
    example="tokendrop plan jobs/paper/gpt3_350m_ltd.yaml scaling.profile=a100-40g-8",
)
