"""The decisions of a run's adaptive schedules, as its workers make them together."""

from functools import partial
from pathlib import Path
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import DamagedDataError
from tokendrop.launch.collectives import broadcast_from_rank_0
from tokendrop.track.decisions import DECISIONS, note_decision, with_decisions
from tokendrop.train.adaptive import Decisions
from tokendrop.train.reader import from_rank_0


def decisions_of(config: ExperimentConfig, run: Path, *, rank: int, group: Any, start: int = 0) -> Decisions | None:
    """What is decided of a run by now, as rank 0 sees it; None where the job has nothing to decide.

    Args:
        start: the steps done.
        group: of all ranks, who call this at once, while nothing is saved; None for one process alone.
    Raises:
        DamagedDataError: decisions up to the start are missing, or are those of another job.
    """
    if not config.drop.adaptive:
        return None
    config = config.with_decided(from_rank_0(lambda: with_decisions(config, run).decided, group))
    for key, schedule in config.drop.adaptive.items():
        if (due := schedule.next_decision(config.clock)) is not None and due <= start:
            raise DamagedDataError(
                f"{run / DECISIONS}: a checkpoint of step {start} was trained by what drop.{key} had decided, and the"
                f" decisions from step {due} on are missing"
            )
    return Decisions(
        config,
        agree=broadcast_from_rank_0,  # not by that group, on which a checkpoint may just be saved
        record=partial(note_decision, run) if rank == 0 else lambda schedule, decision: None,
    )
