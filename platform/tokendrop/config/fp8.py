"""Matrix products in fp8: which jobs can have them."""

from tokendrop.config.drop_method import DropMethod
from tokendrop.config.train import TrainConfig

MULTIPLE = 16
"""Of which fp8 matrix products of a GPU want their sizes to be multiples."""


def check_fp8(train: TrainConfig, *, width: int, method: DropMethod) -> None:
    """Raises ValueError where layers of such a width, by such a method, can't be trained in fp8 as the job says."""
    if train.fp8 is None:
        if train.fp8_emulated:
            raise ValueError(
                "train.fp8_emulated: without train.fp8 it would do nothing; want that too, or leave it out"
            )
        return
    if width % MULTIPLE:
        raise ValueError(f"model.width: with train.fp8 want a multiple of {MULTIPLE}, got {width}")
    if train.precision not in ("auto", "bf16"):
        raise ValueError(
            f"train.precision: with train.fp8 the rest is computed in bf16; want bf16 or auto, got '{train.precision}'"
        )
    if train.strategy == "deepspeed":
        raise ValueError("train.fp8: not with strategy 'deepspeed'; want train.strategy ddp or fsdp")
    if train.group > 1:
        raise ValueError(
            f"train.fp8: not with train.{train.group_key}={train.group}, whose workers would scale parts of a tensor"
            " apart; want 1, or no fp8"
        )
    if method.counts != "tokens":
        raise ValueError(
            f"train.fp8: method '{method.method}' may leave a layer no sequence at all, which has no largest value to"
            " scale by; want another drop.method, or no fp8"
        )
