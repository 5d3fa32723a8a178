"""Kept lengths that are decided while the run goes: by a probe of how dropping changes the loss."""

from collections.abc import Callable
from dataclasses import dataclass

from tokendrop.config.experiment import ExperimentConfig

Probe = Callable[[ExperimentConfig, int, str], float]
"""The gap, in nats, after so many steps: how much higher the loss is where the layers of one schedule, by key, drop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision of one schedule."""

    step: int
    """The steps that were done when it was made."""
    kept_length: int
    gap: float | None
    """Nats; None where the budget left no choice, so that nothing was probed."""


class Decisions:
    """What is decided of a job's adaptive schedules, on every worker the same.

    A decision that was recorded is never made again: a run that goes on from an earlier checkpoint takes it as it was.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        agree: Callable[[int], int],
        record: Callable[[str, Decision], None],
    ) -> None:
        """
        Args:
            config: with all decisions that are recorded.
            agree: called by all ranks at once; returns on all of them what rank 0 gave.
            record: told the key of the schedule and each decision, before anything is trained on it.
        """
        self.config, self._agree, self._record = config, agree, record

    @property
    def config(self) -> ExperimentConfig:
        """The job with all decisions until now."""
        return self._config

    @config.setter
    def config(self, config: ExperimentConfig) -> None:
        self._config = config
        self._next = {key: one.next_decision(config.clock) for key, one in config.drop.adaptive.items()}

    def are_due(self, step: int) -> bool:
        """Whether something is to be decided once `step` steps are done; the same on all ranks."""
        return step in self._next.values()

    def decide(self, step: int, probe: Probe) -> None:
        """Decide what is due once `step` steps are done; called by all ranks at once."""
        for key in [key for key, due in self._next.items() if due == step]:
            config = self.config
            schedule = config.drop.adaptive[key]
            stays, grows = schedule.choices(config.clock)
            gap = None if stays == grows else probe(config, step, key)
            kept = self._agree(grows if gap is None or schedule.wants(gap) else stays)
            decided = config.with_decided({key: (*schedule.decided, kept)})  # which may fail, unlike what is recorded
            self._record(key, Decision(step=step, kept_length=kept, gap=gap))
            self.config = decided


def kept_by_schedule(config: ExperimentConfig, key: str, step: int) -> dict[int, int]:
    """What the routes of one schedule keep at `step`, by their first layers, and all others whole."""
    plan, full = config.plan, config.model.sequence_length
    mine = {first for first, _ in config.drop.spans_of(key, plan.shape.layers)}
    return {first: kept if first in mine else full for first, kept in plan.at(step).kept_by_route.items()}
