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
    """Copy the decisions that were made before `step`, and before it began, into a new run's folder."""
    found = read_decisions(run)
    if found:
        before = {key: [one for one in decisions if one.step <= step] for key, decisions in found.items()}
        _write(to, {key: decisions for key, decisions in before.items() if decisions})


def forget_decisions(run: Path) -> None:
    """Those of a run that begins anew."""
    (run / DECISIONS).unlink(missing_ok=True)


def with_decisions(config: ExperimentConfig, run: Path, *, until: float = inf) -> ExperimentConfig:
    """A run's job with what is decided by now, behind what the job itself says.

    Args:
        until: the last step that decisions may be made before.
    Raises:
        DamagedDataError: the file of the decisions was changed since, or they are not those of this job.
    """
    if not config.drop.adaptive:
        return config
    decided = dict(config.decided)
    try:
        for key, made in read_decisions(run).items():
            decisions = [one for one in made if one.step <= until]
            if not decisions:
                continue
            before = config.drop.adaptive[key].number_of(config.clock, decisions[0].step)
            decided[key] = (*decided[key][:before], *(one.kept_length for one in decisions))
        return config.with_decided(decided)
    except (KeyError, IndexError, ValueError) as error:
        raise DamagedDataError(f"{run / DECISIONS}: not the decisions of the job in {run} ({error})") from None


class DecidedJob:
    """A run's job for those who follow it: as it is decided by now."""

    def __init__(self, config: ExperimentConfig, run: Path) -> None:
        self.config, self.run = config, run
        self._seen = (0, 0)

    def renew(self) -> bool:
        """Take in what was decided since this was last asked; whether there was something."""
        if not self.config.drop.adaptive:
            return False
        try:
            state = (self.run / DECISIONS).stat()
        except FileNotFoundError:
            return False
        if (now := (state.st_mtime_ns, state.st_ino)) == self._seen:
            return False
        self._seen, before = now, self.config
        self.config = with_decisions(before, self.run)
        return self.config is not before


def _write(run: Path, decisions: Mapping[str, Sequence[Decision]]) -> None:
    tree = {key: [asdict(one) for one in some] for key, some in decisions.items()}
    atomic_write(run / DECISIONS, seal_json({"decisions": tree}).encode())
