"""Arms at equal cost: each run is as long as its budget lets it be, by its plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.schedule.duration import Duration
from tokendrop.schedule.scaling import estimate

Measure = Literal["layer_tokens", "flops", "tokens", "gpu_hours"]
"""What a run consumes; gpu_hours by the device profile of `scaling.profile`."""

BUDGET = "budget"
"""The axis of a sweep with several budgets."""
_MOST_STEPS = 10**12


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every run of a sweep may consume; `train.length` follows from it, and with that all shares of it."""

    equal: Measure
    amounts: tuple[float, ...] = ()
    """Of `equal`; each arm is trained with each of them. What the base job takes when left out."""

    def __post_init__(self) -> None:
        if any(amount <= 0 for amount in self.amounts):
            raise ValueError(f"amounts: want numbers above 0, got {min(self.amounts):g}")
        if len(set(self.amounts)) < len(self.amounts):
            raise ValueError("amounts: want each amount once")


def cost_of(config: ExperimentConfig, measure: Measure) -> float:
    """What a run takes by its plan.

    Raises:
        UserError: nothing says how long its epochs are, or for GPU-hours what its devices can do.
    """
    plan, profile = config.plan, config.scaling.profile
    if measure == "layer_tokens":
        return plan.layer_tokens(plan.steps)
    if measure == "flops":
        return plan.flops(plan.steps)
    if measure == "tokens":
        return plan.steps * plan.tokens_per_step
    if profile is None:
        raise UserError("scaling.profile: equal GPU-hours want a device profile, such as a100-40g-8")
    return estimate(plan, profile, config.checkpoint_steps).gpu_hours


def within(config: ExperimentConfig, measure: Measure, amount: float) -> ExperimentConfig:
    """The same run, as long as it can be for at most so much.

    Raises:
        UserError: a single step takes more, or the job is wrong at some length on the way.
    """

    def takes(steps: int) -> float:
        return cost_of(_of_length(config, steps), measure)

    steps = _most(takes, amount, begin=config.steps)
    if steps == 0:
        raise UserError(f"budget: {amount:g} {measure} are less than one step takes, {takes(1):g}")
    return _of_length(config, steps)


def _of_length(config: ExperimentConfig, steps: int) -> ExperimentConfig:
    try:
        return replace(config, train=replace(config.train, length=Duration(Fraction(steps), "steps")))
    except ValueError as error:
        raise UserError(f"with a length of {steps:,} steps, {error}") from None


def _most(takes: Callable[[int], float], amount: float, *, begin: int) -> int:
    """The largest number of steps that takes at most `amount`; 0 where one takes more. Longer runs take more."""
    low, high = 0, begin
    while takes(high) <= amount:
        low, high = high, 2 * high
        if high > _MOST_STEPS:
            raise UserError(f"budget: {amount:g} is enough for more than {_MOST_STEPS:,} steps; want less")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) <= amount else (low, middle)
    return low
