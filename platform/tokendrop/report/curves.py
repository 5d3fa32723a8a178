"""The data of the charts: rows of plain numbers, few enough to be drawn and sent."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tokendrop.report.arms import Arm

Rows = list[dict[str, Any]]
MOST_POINTS = 500  # of a curve
_MOST_IN_ALL = 15_000  # points of a chart
_LEAST_POINTS = 50
_BINS = 100  # of the spread of a throughput


def datasets(arms: Sequence[Arm]) -> dict[str, Rows]:
    """The rows of all charts, by the names that charts know them by; the same for equal runs."""
    most = max(_LEAST_POINTS, min(MOST_POINTS, _MOST_IN_ALL // len(arms)))
    makers: dict[str, Callable[[Arm, int], Iterator[dict[str, Any]]]] = {
        "validation": _validation,
        "training": _training,
        "schedule": _schedule,
        "marks": _marks,
        "throughput": _throughput,
        "time": _time,
    }
    return {
        name: [{"arm": arm.label, **row} for arm in arms for row in make(arm, most)] for name, make in makers.items()
    }


def thinned(count: int, most: int, keep: Sequence[int] = ()) -> np.ndarray:
    """Places of at most `most` of `count` points, evenly apart, with the first, the last and those to keep."""
    kept = sorted({one for one in keep if 0 <= one < count})[: max(0, most - 2)]
    if count <= most:
        return np.arange(count)
    return np.unique([*np.linspace(0, count - 1, most - len(kept)).round().astype(int), *kept])


def _validation(arm: Arm, most: int) -> Iterator[dict[str, Any]]:
    """The mean of an arm's runs at each step that one was validated at, and its least and most."""
    names = ("step", "layer_tokens", "flops", "seconds")
    found: dict[int, list[tuple[float, ...]]] = {}
    for run in arm.runs:
        at = np.flatnonzero(~np.isnan(run.steps["val_loss"]))
        for row in zip(*(run.steps[name][at].tolist() for name in (*names, "val_loss")), strict=True):
            if math.isfinite(row[-1]):
                found.setdefault(row[0], []).append(row)
    steps = sorted(found)
    for step in [steps[place] for place in thinned(len(steps), most)]:
        rows = np.array(found[step])
        means, losses = rows.mean(axis=0).tolist(), rows[:, -1]
        place: dict[str, float] = dict(zip(names, means[:-1], strict=True))
        yield {
            **_rounded(place),
            **_rounded({"loss": means[-1], "low": losses.min(), "high": losses.max()}),
            "runs": len(rows),
        }


def _training(arm: Arm, most: int) -> Iterator[dict[str, Any]]:
    """Training losses, each point the mean of the steps since the one before; null where none is a number."""
    last = arm.longest.last
    edges = np.unique(np.linspace(0, last, min(most, last) + 1).round().astype(int))
    means = np.array([_means(run.steps["step"], run.steps["loss"], edges) for run in arm.runs])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where no run has a number
        columns = [np.nanmean(means, axis=0), np.nanmin(means, axis=0), np.nanmax(means, axis=0)]
    for step, *values in zip(edges[1:].tolist(), *(column.tolist() for column in columns), strict=True):
        yield {"step": step, **_rounded(dict(zip(("loss", "low", "high"), values, strict=True)))}


def _means(steps: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean of the finite values of the steps in each bin, edge < step <= next edge; NaN for none."""
    good = np.isfinite(values)
    sums, _ = np.histogram(steps[good] - 1, edges, weights=values[good])
    counts, _ = np.histogram(steps[good] - 1, edges)
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def _schedule(arm: Arm, most: int) -> Iterator[dict[str, Any]]:
    """Kept length, learning rate and workers of the run that came furthest."""
    steps = arm.longest.steps
    moves = np.flatnonzero((np.diff(steps["kept_length"]) != 0) | (np.diff(steps["world_size"]) != 0))
    edges = [one for place in moves.tolist() for one in (place, place + 1)]
    keep = [int(steps["lr"].argmax()), *(edges if len(edges) <= most // 2 else [])]
    names = ("step", "kept_length", "lr", "world_size")
    places = thinned(len(steps["step"]), most, keep)
    for row in zip(*(steps[name][places].tolist() for name in names), strict=True):
        yield _rounded(dict(zip(names, row, strict=True)))


def _marks(arm: Arm, most: int) -> Iterator[dict[str, Any]]:
    marks = [(step, what, run.folder.name) for run in arm.runs for step, what in run.marks()]
    for place in thinned(len(marks), most):
        step, what, run = marks[place]
        yield {"step": step, "what": what, "kind": what.partition(",")[0].split()[0], "run": run}


def _throughput(arm: Arm, most: int) -> Iterator[dict[str, Any]]:
    """Tokens a second: the median of the steps of all of an arm's runs in each bin, and 10% to 90% of them."""
    steps = np.concatenate([run.steps["step"] for run in arm.runs])
    speeds = np.concatenate([speeds_of(run.steps) for run in arm.runs])
    order = np.argsort(steps, kind="stable")
    steps, speeds = steps[order], speeds[order]
    edges = np.unique(np.linspace(0, steps[-1], min(_BINS, int(steps[-1])) + 1).round().astype(int))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = speeds[np.searchsorted(steps, low, "right") : np.searchsorted(steps, high, "right")]
        inside = inside[np.isfinite(inside)]
        if len(inside):
            values = np.quantile(inside, [0.1, 0.5, 0.9]).tolist()
            yield {"step": high, **_rounded(dict(zip(("low", "tokens_per_s", "high"), values, strict=True)))}


def speeds_of(steps: dict[str, np.ndarray]) -> np.ndarray:
    """Tokens a second of each step."""
    tokens = np.diff(steps["tokens"], prepend=0)
    times = steps["step_time_s"]
    return np.divide(tokens, times, out=np.full(len(tokens), np.nan), where=times > 0)


def _time(arm: Arm, most: int) -> Iterator[dict[str, Any]]:
    """Seconds by what they went to, the mean of an arm's runs that have them recorded."""
    of_runs = [run.seconds_of() for run in arm.runs]
    for part in dict.fromkeys(part for run in of_runs for part in run):
        yield {"part": part, **_rounded({"seconds": float(np.mean([run[part] for run in of_runs if part in run]))})}


def _rounded(row: dict[str, float]) -> dict[str, float | int | None]:
    """Six digits, which is more than a chart shows; null for what is no number."""
    return {key: _short(float(value)) for key, value in row.items()}


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.6g}")
