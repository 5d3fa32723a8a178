"""Libraries that some jobs want, and most installations do without; imports none of them."""

from importlib.util import find_spec

from tokendrop.config.train import TrainConfig
from tokendrop.errors import UserError


def check_installed(training: TrainConfig) -> None:
    """Raises UserError where a library that the job asks for is not installed."""
    if training.strategy == "deepspeed":
        check_deepspeed_installed()
    check_fp8_installed(training)


def check_deepspeed_installed() -> None:
    """Raises UserError where DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        raise UserError(
            "train.strategy: DeepSpeed is not installed here; want pip install 'tokendrop[deepspeed]', or 'fsdp'"
        )


def check_fp8_installed(training: TrainConfig) -> None:
    """Raises UserError where a job wants torchao and it is not installed."""
    if training.fp8 is not None and find_spec("torchao") is None:
        raise UserError("train.fp8: torchao is not installed here; want pip install 'tokendrop[fp8]', or no fp8")
