"""How measurements are taken and told."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from tokendrop.train.device import describe_device, pick_device


def interleave(
    cases: Mapping[str, Callable[[], float]], *, rounds: int, log: Callable[[str], None]
) -> dict[str, list[float]]:
    """Run every case once a round, so that a slow minute of the machine falls on all of them alike.

    Every other round runs backwards: what a case finds in caches and heap depends on the case before it.

    Returns:
        For each case its measurements, one a round.
    """
    results: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(1, rounds + 1):
        for name in list(cases)[:: 1 if number % 2 else -1]:
            results[name].append(cases[name]())
        log(f"round    {number}/{rounds}: " + "  ".join(f"{name} {values[-1]:.4g}" for name, values in results.items()))
    return results


def figure(values: Sequence[float], unit: str) -> dict[str, Any]:
    """A figure as scripts read it."""
    return {"median": median(values), "min": min(values), "max": max(values), "unit": unit}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def bench_result(name: str, figures: Mapping[str, Any], command: str) -> dict[str, Any]:
    """What `tokendrop bench NAME --json` prints."""
    return {"bench": name, "machine": machine(), "figures": dict(figures), "command": command}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "device": describe_device(pick_device())["name"],
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
