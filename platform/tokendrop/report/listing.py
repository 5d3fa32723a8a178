"""Runs of a folder, as `tokendrop runs` lists them: a millisecond each, so their records are read from the end."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tokendrop.atomic import is_locked
from tokendrop.errors import UserError
from tokendrop.track.journal import METRICS, MetricsTail
from tokendrop.track.lineage import LINEAGE
from tokendrop.track.mlflow import STATE
from tokendrop.track.run_folder import JOB, PLAN, TRIALS

State = Literal["running", "finished", "failed", "stopped", "damaged"]
Tree = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it
_BELOW = 2  # folders within folders that are looked into, as those of sweeps
_TAILS = (2**12, 2**16, 2**20, 2**22)  # bytes of a record's end that are looked at, until a loss is found
_VAL_LOSS = re.compile(rb'"val_loss": ([^n,][^,]*),')  # a number, NaN or Infinity; not null


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """What a run is and how far it came."""

    run: str
    """Its folder."""
    name: str
    state: State
    step: int
    steps: int | None
    """Of the plan."""
    loss: float | None
    val_loss: float | None
    """The last one that was measured."""
    layer_token_saving: float | None
    """By plan, of the whole run."""
    hours: float | None
    """From the first line of its record to the last."""
    forked_from: str | None
    """The folder of its parent; null for a run that is no fork."""
    forked_at: int | None
    """The step up to which it is its parent's."""


def find_runs(folder: Path) -> list[Path]:
    """Run folders: this one, those in it and in the folders there by name, or those of this sweep in its order.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; want a run folder, or a folder of them")
    trials = _json(folder / TRIALS)
    if trials is not None and isinstance(trials.get("trials"), dict):
        runs = [folder.absolute().parent.parent / name for name in trials["trials"]]
        return [run for run in runs if (run / JOB).is_file()]
    return sorted(_runs_in(folder, _BELOW))


def some_runs(folder: Path) -> list[Path]:
    """The same, where there is one at least.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if not (runs := find_runs(folder)):
        raise UserError(f"{folder}: no run folder in it; want one that 'tokendrop train' made, or a folder of them")
    return runs


def _runs_in(folder: Path, below: int) -> Iterator[Path]:
    if (folder / JOB).is_file():
        yield folder
    elif below:
        with os.scandir(folder) as entries:
            inner = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        for name in inner:
            try:
                yield from _runs_in(folder / name, below - 1)
            except OSError:  # another user's
                continue


def overview(run: Path) -> RunOverview:
    """What can be told of a run at a glance; files of it that are damaged make it a damaged one."""
    name, plan = _name(run), _json(run / PLAN)
    planned = _planned(plan) if plan is not None else None
    steps, saving = planned or (None, None)
    step, val_loss, is_lost = _last(run)
    parent, forked_at = _origin(run)
    done = (forked_at or 0) if step is None else step["step"]
    is_damaged = name is None or (plan is not None and planned is None)
    return RunOverview(
        run=str(run),
        name=name or run.name,
        state="damaged" if is_damaged else _state(run, done=done, steps=steps, is_lost=is_lost),
        step=done,
        steps=steps,
        loss=None if step is None else step["loss"],
        val_loss=val_loss,
        layer_token_saving=saving,
        hours=_hours(run, step),
        forked_from=parent,
        forked_at=forked_at,
    )


def _name(run: Path) -> str | None:
    """The first key of a resolved job; None where the file is damaged."""
    try:
        with (run / JOB).open(encoding="utf-8") as file:
            first = yaml.load(file.readline(), _LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return str(first["name"]) if isinstance(first, dict) and "name" in first else None


def _json(path: Path) -> Tree | None:
    """An object; an empty one where it can't be read, None where there is no such file."""
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _origin(run: Path) -> tuple[str, int] | tuple[None, None]:
    """The parent's folder and the step of a fork, as `Lineage` has them."""
    tree = _json(run / LINEAGE) or {}
    parent, step = tree.get("parent"), tree.get("step")
    return (parent, step) if isinstance(parent, str) and isinstance(step, int) else (None, None)


def _planned(plan: Tree) -> tuple[int, float] | None:
    """Steps and layer tokens saved, as `RunPlan` has them; None where this is no plan."""
    try:
        last, shape = plan["segments"][-1], plan["shape"]
        steps = last["stop"]
        full = steps * plan["batch"]["global_batch"] * shape["layers"] * shape["sequence_length"]
        layer_tokens = last["layer_tokens_before"] + (steps - last["start"]) * last["layer_tokens_per_step"]
        return int(steps), 1 - layer_tokens / full
    except (KeyError, IndexError, TypeError, ArithmeticError):
        return None


def _last(run: Path) -> tuple[Tree | None, float | None, bool]:
    """The last step of a run's record, the last validation loss there, and whether workers were lost since."""
    path = run / METRICS
    try:
        size = path.stat().st_size
    except OSError:
        return None, None, False
    step, val_loss, is_lost = None, None, False
    for tail in _TAILS:
        if step is None:
            lines = MetricsTail(run, max(0, size - tail)).read(tail)
            step = next((line for line in reversed(lines) if "step" in line), None)
            told = {key for line in lines[lines.index(step) + 1 if step else 0 :] for key in line}
            is_lost = "lost" in told and "attempt_from" not in told
        found = _VAL_LOSS.findall(_end(path, tail))
        val_loss = float(found[-1]) if found else None
        if tail >= size or (step is not None and found):
            break
    return step, val_loss, is_lost


def _end(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size))
        return file.read()


def _state(run: Path, *, done: int, steps: int | None, is_lost: bool) -> State:
    if is_locked(run):
        return "running"
    if steps is not None and done >= steps:
        return "finished"
    has_failed = is_lost or (_json(run / STATE) or {}).get("status") == "FAILED"
    return "failed" if has_failed else "stopped"


def _hours(run: Path, step: Tree | None) -> float | None:
    if step is None:
        return None
    with (run / METRICS).open("rb") as file:
        head = file.read(_TAILS[0]).split()
    first = next((head[number + 1] for number, word in enumerate(head[:-1]) if word == b'"time":'), b"")
    try:
        return max(0.0, step["time"] - float(first.rstrip(b"}"))) / 3600
    except (ValueError, KeyError, TypeError):
        return None


def job_tree(run: Path) -> Tree:
    """A run's resolved job with dotted keys, read fast and unchecked; empty where it can't be read."""
    try:
        tree = yaml.load((run / JOB).read_bytes(), _LOADER)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return leaves(tree) if isinstance(tree, dict) else {}


def leaves(tree: Tree, prefix: str = "") -> Tree:
    """The values of a job by their dotted keys; a list is one value."""
    found: Tree = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
