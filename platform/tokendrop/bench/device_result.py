"""What `tokendrop bench device` tells of one model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tokendrop.bench.device_model import FULL, PLAIN, UPDATE, Measured, grown_micro_batch, kept_lengths
from tokendrop.bench.figures import figure, ratios
from tokendrop.bench.schedule_saving import schedule_figures
from tokendrop.config.experiment import ExperimentConfig

_SHAPE = ("layers", "width", "sequence_length", "vocab_size", "mlp_width", "causal")


def step_flops(config: ExperimentConfig) -> int:
    """FLOPs of one micro batch at full length, as the plan counts them."""
    length = config.model.sequence_length
    return config.train.micro_batch * config.model.shape.flops(kept=length, dropped_layers=0)


def model_result(config: ExperimentConfig, measured: Measured, peak: float | None) -> dict[str, Any]:
    """One model of the result.

    Args:
        peak: FLOP/s that the device could reach, where they are known.
    """
    seconds, lengths = measured.seconds, kept_lengths(config.model.sequence_length)
    full, tokens = seconds[FULL], config.train.micro_batch * config.model.sequence_length
    by_length = {kept: seconds[share] for share, kept in lengths.items()}
    grown = {kept: grown_s(config, measured, share) or seconds[share] for share, kept in lengths.items()}
    plain = {
        **_speed(seconds[PLAIN], tokens, step_flops(config), peak),
        "over_ours": figure(ratios(seconds[PLAIN], full), "x time"),
        "peak_memory_bytes": measured.first.peak_bytes[PLAIN],
    }
    return {
        "preset": config.name,
        "fp8": config.train.fp8,
        "compile": config.train.compile,
        "cuda_graphs": config.train.cuda_graphs,
        "shape": {name: getattr(config.model.shape, name) for name in _SHAPE},
        "parameters": config.model.shape.parameters,
        "dropped_layers": len(config.plan.dropped_layers),
        "micro_batch": config.train.micro_batch,
        "rounds": measured.rounds,
        "lengths": {share: length_result(config, measured, share, peak) for share in lengths},
        "plain_gpt2": plain,
        "full_length_alone_ms": figure([s * 1e3 for s in measured.first.alone_s], "ms"),
        "update_ms": figure([s * 1e3 for s in seconds[UPDATE]], "ms"),
        "schedule": schedule_figures(config.plan, by_length, seconds[PLAIN]),
        "schedule_grown": schedule_figures(config.plan, grown, seconds[PLAIN]),
        "schedule_without_update": schedule_figures(
            config.plan,
            {kept: _without_update(times, measured) for kept, times in by_length.items()},
            _without_update(seconds[PLAIN], measured),
        ),
        "start_s": {
            "build": measured.build_s,
            "first_steps": measured.first.first_s,
            "before_rounds": measured.setup_s,
        },
        "host_waits": measured.first.host_waits,
        "checkpoint": None if measured.first.save is None else asdict(measured.first.save),
    }


def main_figures(model: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for first of one model of the result, by names of its own."""
    name = model["preset"].removeprefix("gpt3-")
    return {
        f"tokens_per_s_{name}": model["lengths"][FULL]["tokens_per_s"],
        f"realised_over_theory_{name}": model["schedule"]["realised_over_theoretical"],
        f"realised_over_theory_without_update_{name}": model["schedule_without_update"]["realised_over_theoretical"],
        f"plain_gpt2_over_ours_{name}": model["plain_gpt2"]["over_ours"],
    }


def length_result(config: ExperimentConfig, measured: Measured, share: str, peak: float | None) -> dict[str, Any]:
    """One kept length of a model."""
    shape, seconds = config.model.shape, measured.seconds
    kept, dropped = kept_lengths(shape.sequence_length)[share], len(config.plan.dropped_layers)
    flops, all_flops = (shape.flops(kept=one, dropped_layers=dropped) for one in (kept, shape.sequence_length))
    tokens = config.train.micro_batch * shape.sequence_length
    parts = {part: seconds.get(f"{part} {share}", [0.0] * measured.rounds) for part in ("draw", "move")}
    return {
        "kept_length": kept,
        **_speed(seconds[share], tokens, config.train.micro_batch * flops, peak),
        "time_ratio": figure(ratios(seconds[share], seconds[FULL]), "x full"),
        "flops_ratio": flops / all_flops,
        "gather_combine_share": figure(ratios(parts["move"], seconds[share]), "of the step"),
        "draw_share": figure(ratios(parts["draw"], seconds[share]), "of the step"),
        "peak_memory_bytes": measured.first.peak_bytes[share],
        "grown": _grown_result(config, measured, share),
    }


def _grown_result(config: ExperimentConfig, measured: Measured, share: str) -> dict[str, Any] | None:
    """A kept length with a micro batch that has grown for it; None where it does not grow."""
    seconds = grown_s(config, measured, share)
    if seconds is None:
        return None
    return {
        "micro_batch": grown_micro_batch(config, kept_lengths(config.model.sequence_length)[share]),
        "step_ms": figure([s * 1e3 for s in measured.seconds[f"grown {share}"]], "ms"),
        "time_ratio": figure(ratios(seconds, measured.seconds[FULL]), "x full"),
        "peak_memory_bytes": measured.first.peak_bytes[f"grown {share}"],
    }


def grown_s(config: ExperimentConfig, measured: Measured, share: str) -> list[float] | None:
    """Seconds of the work of one step by a micro batch that has grown, its update counted as often; None where it does
    not grow."""
    steps = measured.seconds.get(f"grown {share}")
    if steps is None:
        return None
    times = grown_micro_batch(config, kept_lengths(config.model.sequence_length)[share]) / config.train.micro_batch
    alone = _without_update(steps, measured)
    return [one / times + step - one for step, one in zip(steps, alone, strict=True)]


def _without_update(steps: Sequence[float], measured: Measured) -> list[float]:
    """Of each step its forward and backward; clip and AdamW, which a noisy measurement may give, are half at most."""
    return [step - min(update, step / 2) for step, update in zip(steps, measured.seconds[UPDATE], strict=True)]


def _speed(seconds: Sequence[float], tokens: int, flops: int, peak: float | None) -> dict[str, Any]:
    return {
        "step_ms": figure([s * 1e3 for s in seconds], "ms"),
        "tokens_per_s": figure([tokens / s for s in seconds], "tokens/s"),
        "flops_per_s": figure([flops / s for s in seconds], "FLOP/s"),
        "mfu": None if peak is None else figure([flops / s / peak for s in seconds], "of the peak"),
    }
