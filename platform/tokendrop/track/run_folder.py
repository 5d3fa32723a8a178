"""A run's folder: what describes the run, where its parts lie, what it came to."""

import hashlib
import inspect
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from tokendrop.atomic import atomic_write, is_locked
from tokendrop.config import plugin
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import is_uri
from tokendrop.config.load import dump_job, load_job
from tokendrop.data.shards.format import MANIFEST, TOKENIZER
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.track.decisions import DECISIONS, begin_decisions, with_decisions
from tokendrop.track.environment import describe_driver
from tokendrop.track.journal import STEPS, read_events, read_steps
from tokendrop.track.run_copy import bring, is_there, set_apart
from tokendrop.track.run_files import JOB
from tokendrop.track.run_home import HOME, write_home
from tokendrop.track.run_store import address_below, runs_place
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed_step, read_meta
from tokendrop.train.sealed import file_sha256, read_sealed_json, read_sealed_text, seal_json, seal_text

PLAN, ENVIRONMENT, DATA = "plan.json", "environment.json", "data.txt"
SWEEPS, TRIALS = "sweeps", "trials.json"
"""A sweep leaves a folder SWEEPS/NAME beside its runs, in which TRIALS names them."""


def create_run_folder(config: ExperimentConfig) -> Path:
    """A new, empty folder below `runs_folder`, or the one that the job names.

    Raises:
        UserError: none can be made there.
    """
    root = runs_place(config.runs_folder)
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if config.run is not None:
            _named(config).mkdir(parents=True, exist_ok=True)
            return _at_home(config, root / config.run)
        for folder in (root / stem, *(root / f"{stem}-{number}" for number in range(2, 100))):
            with suppress(FileExistsError):
                folder.mkdir()
                if not (is_uri(config.runs_folder) and is_there(config.runs_folder, folder.name)):
                    return _at_home(config, folder)
    except OSError as error:
        raise UserError(f"runs_folder: can't make a folder below {root} ({error.strerror or error})") from None
    raise UserError(f"runs_folder: {root} has a hundred runs of this second already")


def begun_run(config: ExperimentConfig) -> Path | None:
    """The run folder that the job names, where the run has begun.

    Raises:
        UserError: it is the run of another job, or no run.
    """
    if config.run is None:
        return None
    folder = _named(config)
    if is_uri(config.runs_folder):
        if is_there(config.runs_folder, config.run):
            bring(config.runs_folder, config.run)
        elif not is_locked(folder):
            set_apart(folder)
    if not (folder / DATA).is_file():
        seen = {path.name for path in folder.glob("*") if not path.name.startswith(".")}
        if seen <= {JOB, PLAN, ENVIRONMENT, TOKENIZER, DECISIONS, plugin.COPIES}:  # less than a run writes first
            return None
        raise UserError(f"run: {folder} is no run folder, and not empty; want another name")
    begun, _ = open_run_folder(folder)
    if begun.name != config.name:
        raise UserError(f"run: {folder} is one of the job {begun.name!r}, this is {config.name!r}; want another folder")
    return folder


def _at_home(config: ExperimentConfig, folder: Path) -> Path:
    """A new run's folder, which knows from now on where in a store the run is kept, if it is."""
    if is_uri(config.runs_folder) and not (folder / HOME).exists():  # which a driver may just be changing
        write_home(folder, address_below(config.runs_folder, folder.name))
    return folder


def _named(config: ExperimentConfig) -> Path:
    """The run folder that the job names; UserError where a link there leads to another place."""
    root = runs_place(config.runs_folder)
    folder = root / (config.run or "")
    try:
        leads_to = folder.resolve()
    except (OSError, RuntimeError):  # a loop of links
        raise UserError(f"run: {folder} is a link that leads nowhere; want a folder") from None
    if not leads_to.is_relative_to(root.resolve()):
        raise UserError(f"run: {folder} leads out of runs_folder, to {leads_to}; want a folder in it")
    return folder


def describe_run(folder: Path, config: ExperimentConfig, data: Path) -> None:
    """Write down the resolved job, its plan, the environment and where the token shards are.

    The tokenizer is copied: a model is of use without its corpus, but not without its vocabulary; and so is the file of
    a method or task of the user's own. Each file is written whole, and has its checksum in it; the tokenizer has it
    beside the place of the token shards. What was decided before the first checkpoint counts no more.
    """
    if not committed_step(folder / CHECKPOINTS):
        begin_decisions(folder, config)
    atomic_write(folder / JOB, seal_text(dump_job(config)).encode())
    for branch, name in ((config.drop, config.drop.method), (config.task, config.task.kind)):
        if copy := plugin.copy_of(name, folder):
            copy.parent.mkdir(exist_ok=True)
            atomic_write(copy, Path(inspect.getfile(type(branch))).read_bytes())
    plan = asdict(config.plan)
    for segment in plan["segments"]:
        del segment["routes"]  # those of the plan
    atomic_write(folder / PLAN, seal_json(plan).encode())
    describe_driver(folder / ENVIRONMENT)
    tokenizer = (data / TOKENIZER).read_bytes()
    atomic_write(folder / TOKENIZER, tokenizer)
    checksum = f"# {TOKENIZER} sha256 {hashlib.sha256(tokenizer).hexdigest()}"
    atomic_write(folder / DATA, seal_text(f"{data}\n{checksum}\n").encode())


def open_run_folder(folder: Path) -> tuple[ExperimentConfig, Path]:
    """The job of an earlier run, as it is decided by now, and the folder of its token shards.

    Raises:
        UserError: this is no run folder.
        DamagedDataError: what describes the run was cut or changed since.
    """
    for part in (JOB, DATA):
        if not (folder / part).is_file():
            raise UserError(f"{folder}: not a run folder (no {part} in it); want one that 'tokendrop train' made")
    read_sealed_text(folder / JOB)
    if (folder / PLAN).exists():
        read_sealed_json(folder / PLAN)
    config = with_decisions(load_job(folder / JOB, to_run=False), folder)
    return config, Path(read_sealed_text(folder / DATA).splitlines()[0])


def tokenizer_of(folder: Path) -> Path:
    """The tokenizer's file in a run folder.

    Raises:
        UserError: there is none.
        DamagedDataError: it is not the one that the run began with.
    """
    path = folder / TOKENIZER
    if not path.is_file() or not (folder / DATA).is_file():
        raise UserError(f"{folder}: no {TOKENIZER} in it; want a checkpoint inside the run folder that made it")
    if f"# {TOKENIZER} sha256 {file_sha256(path)}\n" not in read_sealed_text(folder / DATA):
        raise DamagedDataError(f"{path}: damaged; its checksum is not the one in {DATA}")
    return path


def shards_of(run: Path) -> Path:
    """The folder of token shards that a run trains on.

    Raises:
        UserError: this is no run folder, or its token shards are gone.
    """
    _, data = open_run_folder(run)
    if not (data / MANIFEST).is_file():
        raise UserError(f"{run}: the token shards of this run are gone; want {data}")
    return data


def check_model(checkpoint: Path, config: ExperimentConfig) -> None:
    """Raises UserError unless a checkpoint is of the job's model: what it computes, not where its sizes come from."""
    saved, wanted = read_meta(checkpoint).get("model"), asdict(config.model)
    for key in wanted:
        was = saved.get(key) if isinstance(saved, dict) else None
        if key not in ("preset", "init_from", "new_head") and was != wanted[key]:
            raise UserError(
                f"{checkpoint}: a checkpoint of another model: model.{key} is {was} there and {wanted[key]} in this job"
            )


def summarize(folder: Path) -> dict[str, Any]:
    """What a run came to; the names are what scripts rely on.

    `wall_clock_s` is the time spent in training steps, data and checkpoints included, validation and start-up not.

    Raises:
        UserError: this is no run folder.
        DamagedDataError: its record of the steps is damaged, or lacks some.
    """
    config, _ = open_run_folder(folder)
    plan, steps = config.plan, read_steps(folder)
    if not steps or [row["step"] for row in steps] != list(range(1, len(steps) + 1)):
        raise DamagedDataError(f"{folder / STEPS}: damaged; want each step from 1 on, found {len(steps)} of them")
    seconds = sum(row["step_time_s"] for row in steps)
    attempts, pauses = read_attempts(folder)
    sizes = [attempt["world_size"] for attempt in attempts]
    validated = [row for row in steps if row["val_loss"] is not None]
    val_loss = validated[-1]["val_loss"] if validated else None
    figures = {} if val_loss is None else config.task.figures(val_loss, validated[-1]["val_figures"] or {})
    return {
        "run": str(folder),
        "steps": steps[-1]["step"],
        "val_loss": val_loss,
        **{f"val_{name}": value for name, value in figures.items()},
        "loss_slope": loss_slope(steps),
        "tokens": steps[-1]["tokens"],
        "layer_tokens": steps[-1]["layer_tokens"],
        "layer_token_saving": plan.layer_token_saving(),
        "flops": steps[-1]["flops"],
        "flops_saving": plan.flops_saving(),
        "wall_clock_s": seconds,
        "step_time_s": _spread([row["step_time_s"] for row in steps]),
        "tokens_per_s": steps[-1]["tokens"] / seconds,
        "data_wait_share": sum(row["data_time_s"] for row in steps) / seconds,
        "resizes": sum(a != b for a, b in pairwise(sizes)),
        "resize_pause_s": sum(pause["pause_s"] for pause in pauses),
        "restarts": max(0, len(attempts) - 1 - len(pauses)),
    }


def loss_slope(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Nats by which the training loss changes in a step at the end: of a line through the last quarter of the steps.

    None with fewer than two losses there that are finite.
    """
    last = [row for row in steps[-max(2, len(steps) // 4) :] if isfinite(row["loss"])]
    if len(last) < 2:
        return None
    return linear_regression([row["step"] for row in last], [row["loss"] for row in last]).slope


def _spread(values: Sequence[float]) -> dict[str, float]:
    """The median of them, and where the lowest and the highest tenth end."""
    rising = sorted(values)
    tenth = len(rising) // 10
    return {"median": median(rising), "p10": rising[tenth], "p90": rising[-1 - tenth]}


def read_attempts(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What metrics.jsonl says of the groups of workers that a run had, and of the planned changes between them."""
    lines = read_events(folder)
    return [line for line in lines if "attempt_from" in line], [line for line in lines if "resize_at" in line]
