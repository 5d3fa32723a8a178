"""Runs as tables, and what their figures tell."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokendrop.render import count, table

_AT_SCALE = (
    "A large model on a GPU nears the saving of the FLOPs: the paper measured 25.6% of the wall clock at 1.3B, with a"
    " third of the layer\ntokens saved. A small model on a CPU saves less time: its embedding, head, optimizer and"
    " data, and its first and last layer,\ncost the same however many tokens are dropped."
)


def run_text(result: Mapping[str, Any], name: str) -> str:
    """What a run came to."""
    header = ["run", "val loss", "perplexity", "layer tokens", "FLOPs", "training time", "tokens/s"]
    cells = [*_counts(result, result), f"{result['wall_clock_s']:.1f} s", f"{result['tokens_per_s']:,.0f}"]
    return table(header, [[name, *cells]])


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
    rows = [
        [name, *_counts(result, results[0]), time, f"{result['wall_clock_s']:.1f} s"]
        for name, result, time in zip(names, results, times, strict=True)
    ]
    step_time = "step time" if step_times is None else "step time, in turns"
    text = table(["run", "val loss", "perplexity", "layer tokens", "FLOPs", step_time, "training time"], rows)
    if step_times is None:
        told = f"Step time: median of each run's own steps (10% to 90% of them); not measured in turns: {not_timed}."
    else:
        turns = step_times[0]["turns"]
        told = f"Step time, in turns: the jobs' steps timed side by side, median (least to most) of {turns} turns."
    told += "\nTraining time: one run after the other, with whatever else the machine did meanwhile."
    drops = any(result["layer_token_saving"] for result in results)
    return "\n\n".join([text, told, *([_AT_SCALE] if drops else [])])


def _counts(result: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    def with_saving(key: str) -> str:
        return count(result[key]) + ("" if result is first else f" ({_change(result[key] / first[key])})")

    losses = [f"{result['val_loss']:.3f}", f"{result['val_perplexity']:.1f}"]
    return [*losses, with_saving("layer_tokens"), with_saving("flops")]


def _change(ratio: float) -> str:
    """0.8 as -20.0%."""
    return f"{ratio - 1:+.1%}"


def _saved(ratio: Mapping[str, Any]) -> str:
    return f"{_change(ratio['median'])} ({ratio['min'] - 1:+.0%} to {ratio['max'] - 1:+.0%})"


def _spread_within(result: Mapping[str, Any]) -> str:
    median, low, high = (result["step_time_s"][key] for key in ("median", "p10", "p90"))
    return f"{median:.3g} s ({low:.3g} to {high:.3g})"
