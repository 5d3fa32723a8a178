"""A new run that begins with a checkpoint of another one, some keys of whose job are changed from there on."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from tokendrop.atomic import atomic_folder
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.config.run import SWEEP
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.launch.results import with_absolute_paths
from tokendrop.launch.resume import NEW_RUN, check_consumed, check_own_files, shards_at_hand
from tokendrop.secrets import redact_all
from tokendrop.track.decisions import copy_decisions, with_decisions
from tokendrop.track.journal import METRICS, STEPS, copy_record, steps_table
from tokendrop.track.lineage import Lineage, read_lineage, write_lineage
from tokendrop.track.parameters import flat
from tokendrop.track.run_folder import (
    DATA,
    JOB,
    begun_run,
    check_model,
    create_run_folder,
    describe_run,
    open_run_folder,
    shards_of,
)
from tokendrop.track.run_home import HOME
from tokendrop.train.checkpoint_index import CHECKPOINTS, check_whole, committed, kept, step_name, step_of

_ORDER = "decides which samples are read next"
_MODEL, _TASK = "decides what the checkpoint's weights are", "decides what they learn"
# Why a key stays as it was, by itself or by a branch that it is in; None where it may be another. The nearest counts.
_STAYS: dict[str, str | None] = {
    **dict.fromkeys(("name", "run", "runs_folder", "train", "drop", "scaling", "checkpoint", "track", "evaluate")),
    **dict.fromkeys(("data.folder", "data.cache", "data.reader", "data.max_rejected")),
    **dict.fromkeys(("seed", "train.global_batch", "data"), _ORDER),
    "model": _MODEL,
    "task": _TASK,
    "train.optimizer": "decides what the checkpoint's optimizer state is",
}


@contextmanager
def begun_fork(parent: Path, step: int, overrides: Sequence[str] = ()) -> Iterator[tuple[ExperimentConfig, Path]]:
    """The job of a fork and its run folder, which goes on from the parent's checkpoint at `step` by `--resume`.

    The folder has that checkpoint, the parent's record up to it, and where all of it comes from. The parent is not
    written to, may be training, and may be removed afterwards. Where the job's `run` names a fork that has begun, it is
    that one. A new one goes again where the block ends with a UserError before anything was trained.

    Args:
        parent: a run folder.
        overrides: of its job, `key=value`.
    Raises:
        UserError: there is no such checkpoint, a key can't change here, or `run` names another run.
        DamagedDataError: the checkpoint, or the record that led to it, is damaged.
    """
    parent = parent.absolute()
    begun, _ = open_run_folder(parent)
    given = ("run=null", *overrides)  # which is a folder of its own
    config = _decided(_of_no_sweep(with_absolute_paths(load_job(parent / JOB, given)), begun), parent, step)
    # as they were written down, and secrets are hidden in both
    changed = _changed(load_job(parent / JOB, to_run=False), load_job(parent / JOB, given, to_run=False))
    lineage = Lineage(parent=str(parent), step=step, overrides=tuple(overrides), changed=changed)
    if (run := begun_run(config)) is not None:
        has = read_lineage(run)
        if has is None or (has.parent, has.step) != (lineage.parent, lineage.step):
            raise UserError(f"run: {run} is no fork of {parent} at step {step}; want another name")
        yield config, run
        return
    _check_keys(config, begun, lineage)
    run = _copied(config, parent, lineage)
    try:
        yield config, run
    except UserError:
        if not (run / METRICS).exists():
            shutil.rmtree(run, ignore_errors=True)
        raise


def _decided(config: ExperimentConfig, parent: Path, step: int) -> ExperimentConfig:
    """A job with what its parent has decided up to `step`; UserError where that is not all that it should have."""
    try:
        decided = with_decisions(config, parent, until=step)
    except DamagedDataError as error:
        raise UserError(f"drop: what {parent} has decided is none of this job's schedules ({error})") from None
    for key, schedule in decided.drop.adaptive.items():
        due = schedule.next_decision(decided.clock)
        if due is not None and due <= step:
            raise UserError(
                f"drop.{key}.decided: want the kept lengths that are decided up to step {step}; {parent} has decided"
                f" nothing at step {due}"
            )
    return decided


def _check_keys(config: ExperimentConfig, begun: ExperimentConfig, lineage: Lineage) -> None:
    """Raises UserError where a key is another than in the parent's job that can't change at a fork."""
    parent, step = lineage.parent, lineage.step
    for key, (was, now) in lineage.changed.items():
        if why := _reason(key):
            raise UserError(f"{key}: {was} in {parent}, {now} in this fork; it {why}, so want {was}, {NEW_RUN}")
    was, now = begun.train.precision, config.train.precision
    if "fp64" in (was, now) and was != now:
        raise UserError(f"train.precision: {was} in {parent}, {now} in this fork; want both fp64, or none of them")
    if config.train.optimizer == "sgd" and config.train.momentum and not begun.train.momentum:
        raise UserError(f"train.momentum: 0 in {parent}, whose checkpoints have none to go on with; want 0, {NEW_RUN}")
    if config.drop.by_token_loss and not begun.drop.by_token_loss:
        raise UserError(
            f"drop.method: '{config.drop.method}' chooses by losses that the checkpoints of '{begun.drop.method}' in"
            f" {parent} do not have; want another method, {NEW_RUN}"
        )
    check_own_files(config, Path(parent))
    if step >= config.steps:
        raise UserError(f"train.length: this fork begins at step {step} and ends at {config.steps}; want a longer one")
    keys = [key for key in lineage.changed if key.startswith("drop.") or key == "train.length"]
    check_consumed(config, begun, step, run=parent, keys=keys)


def _reason(key: str) -> str | None:
    parts = key.split(".")
    near = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((_STAYS[one] for one in near if one in _STAYS), _TASK)


def _changed(begun: ExperimentConfig, config: ExperimentConfig) -> dict[str, tuple[str, str]]:
    was, now = (flat(redact_all(asdict(one))) for one in (begun, config))
    where = ("run", "runs_folder")
    return {
        key: (was.get(key, "nothing"), now.get(key, "nothing"))
        for key in {**was, **now}
        if was.get(key) != now.get(key) and key not in where
    }


def _of_no_sweep(config: ExperimentConfig, begun: ExperimentConfig) -> ExperimentConfig:
    """A job without the tag of the sweep that its parent was a trial of: a fork is none."""
    if not begun.track.sweep:
        return config
    tags = {key: value for key, value in config.track.tags.items() if key != SWEEP}
    return replace(config, track=replace(config.track, tags=tags))


def _copied(config: ExperimentConfig, parent: Path, lineage: Lineage) -> Path:
    """A new run folder with all that a fork begins with; it is there whole, or empty."""
    data = shards_at_hand(config, parent) or shards_of(parent)
    checkpoint = _checkpoint_at(parent, lineage.step)
    with kept(checkpoint):
        check_whole(checkpoint)
        check_model(checkpoint, config)
        run = create_run_folder(config)
        try:
            with atomic_folder(run) as made:
                if (run / HOME).exists():  # of a fork that a store keeps
                    (run / HOME).rename(made / HOME)
                shutil.copytree(checkpoint, made / CHECKPOINTS / checkpoint.name)
                copy_record(parent, made, lineage.step)
                if config.drop.adaptive:
                    copy_decisions(parent, made, lineage.step)
                if steps_table(made)["step"].to_pylist() != [*range(1, lineage.step + 1)]:
                    raise DamagedDataError(f"{parent / STEPS}: damaged; want each step from 1 to {lineage.step}")
                write_lineage(made, lineage)
                describe_run(made, config, data)
        except BaseException:
            with suppress(OSError):
                run.rmdir()  # empty
            raise
    if not (run / DATA).is_file():
        raise UserError(f"run: {run} is not empty; want another name")
    return run


def _checkpoint_at(parent: Path, step: int) -> Path:
    saved = committed(parent / CHECKPOINTS)
    if step not in map(step_of, saved):
        there = ", ".join(f"{step_of(one):,}" for one in saved)
        want = f"want one of {there}" if there else "it has none yet"
        raise UserError(f"--at: {parent} keeps no checkpoint of step {step:,}; {want}")
    return parent / CHECKPOINTS / step_name(step)
