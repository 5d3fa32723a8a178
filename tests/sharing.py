"""Jobs by how their workers share the model out."""

from importlib.util import find_spec

from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig

HAS_DEEPSPEED = find_spec("deepspeed") is not None


def job(strategy: str, precision: str, **changes: object) -> ExperimentConfig:
    """Ten steps with dropping; no size is a multiple of 4, so that shares are uneven."""
    sizes = {"model__layers": 3, "model__width": 18, "model__vocab_size": 51}
    how: dict[str, object] = {"train__strategy": strategy, "train__precision": precision}
    if strategy.startswith("zero"):
        how |= {"train__strategy": "deepspeed", "train__zero_stage": int(strategy[-1])}
    return experiment(train__length="10 steps", train__micro_batch=2, **sizes, **how, **changes)
