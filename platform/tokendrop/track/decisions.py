"""The decisions of a run's adaptive schedules, kept in its folder: made once, and taken as they are from then on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from tokendrop.atomic import atomic_write
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import DamagedDataError
from tokendrop.train.adaptive import Decision
from tokendrop.train.sealed import read_sealed_json, seal_json

DECISIONS = "decisions.json"


def note_decision(run: Path, schedule: str, decision: Decision) -> None:
    """Write down a decision of a schedule, a key below `drop`; called by one process at a time."""
    found = read_decisions(run)
    _write(run, {**found, schedule: [*found.get(schedule, ()), decision]})


def read_decisions(run: Path) -> dict[str, list[Decision]]:
    """The decisions of each schedule of a run, in order; nothing where none was made.

    Raises:
        DamagedDataError: the file was cut or changed since.
    """
    if not (run / DECISIONS).is_file():
        return {}
    tree: dict[str, list[dict[str, Any]]] = read_sealed_json(run / DECISIONS)["decisions"]
    return {key: [Decision(**one) for one in decisions] for key, decisions in tree.items()}


def copy_decisions(run: Path, to: Path, step: int) -> None:
    """Copy the decisions that were made up to `step`, and at it, into a new run's folder."""
    found = read_decisions(run)
    if found:
        before = {key: [one for one in decisions if one.step <= step] for key, decisions in found.items()}
        _write(to, {key: decisions for key, decisions in before.items() if decisions})


def begin_decisions(run: Path, config: ExperimentConfig) -> None:
    """Forget what was decided; where something is to be, the file is there from the begin on.

    A folder on network storage may hide a new one for a minute.
    """
    if config.drop.adaptive:
        _write(run, {})
    else:
        (run / DECISIONS).unlink(missing_ok=True)


def with_decisions(config: ExperimentConfig, run: Path, *, until: float = inf) -> ExperimentConfig:
    """A run's job with what is decided by now, behind what the job itself says.

    Args:
        until: the last step whose decisions count.
    Raises:
        DamagedDataError: the file of the decisions was changed since, or they are not those of this job.
    """
    if not config.drop.adaptive:
        return config
    decided, made = dict(config.decided), read_decisions(run)
    try:
        for key, decisions in made.items():
            steps = [one.step for one in decisions if one.step <= until]
            first = _place(steps, config.drop.adaptive[key].decisions(config.clock))
            decided[key] = (*decided[key][:first], *(one.kept_length for one in decisions[: len(steps)]))
        return config.with_decided(decided)
    except (KeyError, ValueError) as error:
        raise DamagedDataError(f"{run / DECISIONS}: not the decisions of the job in {run} ({error})") from None


def _place(steps: Sequence[int], known: Sequence[int]) -> int:
    """Where steps are among those at which a schedule is decided; ValueError where they are not there in a row."""
    if not steps:
        return len(known)
    first = known.index(steps[0]) if steps[0] in known else len(known)
    if [*known[first : first + len(steps)]] != [*steps]:
        raise ValueError(f"decided at steps {steps[0]} to {steps[-1]}, and not at those of the schedule")
    return first


class DecidedJob:
    """A run's job for those who follow it: as it is decided by now."""

    def __init__(self, config: ExperimentConfig, run: Path) -> None:
        self.config, self.run = config, run
        self._seen = (0, 0)

    def renew(self) -> bool:
        """Take in what was decided since this was last asked; whether there was something."""
        if not self.config.drop.adaptive:
            return False
        before = self.config
        try:
            state = (self.run / DECISIONS).stat()
            if (now := (state.st_mtime_ns, state.st_ino)) == self._seen:
                return False
            self.config = with_decisions(before, self.run)
        except OSError:  # of storage that is away, or a file that is not there yet
            return False
        self._seen = now
        return self.config is not before


def _write(run: Path, decisions: Mapping[str, Sequence[Decision]]) -> None:
    tree = {key: [asdict(one) for one in some] for key, some in decisions.items()}
    atomic_write(run / DECISIONS, seal_json({"decisions": tree}).encode())
