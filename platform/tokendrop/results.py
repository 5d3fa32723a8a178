"""What runs did and came to, as tables for notebooks and scripts: `results.load("runs/*")`."""

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokendrop.errors import UserError
from tokendrop.report.listing import find_runs, job_tree
from tokendrop.report.record import COLUMNS, RunRecord, read_runs

_SCALARS = (bool, int, float, str)
_LARGEST = 2**63


@dataclass(frozen=True, slots=True, repr=False)
class Results:
    """Runs as tables of pyarrow; `.to_pandas()` makes a frame of one, where pandas is installed."""

    steps: pa.Table
    """A row for each step of each run: `run` (its folder), `name` (of its job), `seed`, `step`, `loss`, `val_loss`
    (null where it was not measured, or is no number), `lr`, `kept_length`, `world_size`, `data_time_s`, `step_time_s`;
    so far: `tokens`, `layer_tokens`, `flops`, `seconds` (of training, validation and pauses left out)."""
    summaries: pa.Table
    """A row for each run: `run`, `name`, `seed`, `state`, `step` of `steps`, the last `val_loss` and what its task
    measures (`val_perplexity` ...), what was spent, what is saved by plan (`layer_token_saving`, `flops_saving`), and
    every key of its job (`drop.method` ...)."""
    left_out: tuple[str, ...]
    """A sentence for each run that is damaged, or has no step yet."""

    def __repr__(self) -> str:
        count = len(self.summaries)
        left_out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"<Results of {count} run{'s' * (count != 1)}, {len(self.steps):,} steps{left_out}>"


def load(runs: str | Path | Iterable[str | Path] = "runs/*") -> Results:
    """Read runs, finished or not, from their folders.

    Args:
        runs: a run folder, a folder of them, or a pattern such as `runs/*`; or several of these. What a pattern matches
            beside run folders, such as token shards, is passed over.
    Raises:
        UserError: a pattern matches no run, another path has none, or none of the runs can be read.
    """
    wanted = [runs] if isinstance(runs, str | Path) else [*runs]
    if not wanted:
        raise UserError("results: want at least one run folder or pattern, got none")
    records, left_out = read_runs(path for one in wanted for path in _paths(one))
    if left_out:
        warnings.warn(f"{len(left_out)} of {len(left_out) + len(records)} runs: {' '.join(left_out)}", stacklevel=2)
    return Results(
        steps=pa.concat_tables([_steps(record) for record in records]),
        summaries=_table(
            [_summary(record) for record in records],
            [job_tree(record.folder) for record in records],
        ),
        left_out=tuple(left_out),
    )


def _paths(wanted: str | Path) -> Iterator[Path]:
    """What a path or a pattern means."""
    path = Path(wanted).expanduser()
    if path.exists() or not has_magic(str(path)):
        yield path
        return
    matched = [Path(one) for one in sorted(glob(str(path), recursive=True))]
    found = [run for one in matched if one.is_dir() for run in find_runs(one)]
    if not found:
        what = f"none of the {len(matched)} paths that it matches is" if matched else "it matches nothing that is"
        raise UserError(f"{path}: {what} a run folder; want those that 'tokendrop train' made, such as runs/*")
    yield from found


def _steps(record: RunRecord) -> pa.Table:
    count = len(record.steps["step"])
    who = {"run": str(record.folder), "name": record.config.name, "seed": record.config.seed}
    columns = {name: pa.repeat(value, count) for name, value in who.items()}
    for name in (*COLUMNS, "seconds"):
        columns[name] = pa.array(record.steps[name], from_pandas=name == "val_loss")  # NaN as null
    return pa.table(columns)


def _summary(record: RunRecord) -> dict[str, Any]:
    plan, steps, seconds = record.config.plan, record.steps, float(record.steps["seconds"][-1])
    return {
        "run": str(record.folder),
        "name": record.config.name,
        "seed": record.config.seed,
        "state": record.glance.state,
        "step": record.last,
        "steps": plan.steps,
        "val_loss": None,
        **record.last_validation(),
        "tokens": int(steps["tokens"][-1]),
        "layer_tokens": int(steps["layer_tokens"][-1]),
        "layer_token_saving": plan.layer_token_saving(),
        "flops": float(steps["flops"][-1]),
        "flops_saving": plan.flops_saving(),
        "wall_clock_s": seconds,
        "tokens_per_s": int(steps["tokens"][-1]) / seconds if seconds else None,
    }


def _table(*sides: Sequence[dict[str, Any]]) -> pa.Table:
    """Parts of rows, side by side, as columns: null where a row lacks a key, and the first part that has one counts."""
    columns: dict[str, pa.Array] = {}
    for rows in sides:
        for key in dict.fromkeys(key for row in rows for key in row):
            if key not in columns:
                columns[key] = _column([row.get(key) for row in rows])
    return pa.table(columns)


def _column(values: Sequence[Any]) -> pa.Array:
    """Values of one kind as they are, whole numbers beside others as floats, and else texts: JSON for what is none."""
    kinds = {type(value) for value in values if value is not None}
    is_plain = kinds <= {*_SCALARS} and not any(isinstance(one, int) and abs(one) >= _LARGEST for one in values)
    if is_plain and (len(kinds) < 2 or kinds == {int, float}):
        return pa.array(values, pa.float64() if float in kinds else None)
    return pa.array([value if value is None or isinstance(value, str) else json.dumps(value) for value in values])
