"""A run that diverges: its last checkpoint is one of before."""

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from attempts import attempt, history
from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.train.checkpoint_index import committed, read_meta
from tokendrop.train.engines.ddp import DdpEngine

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("reads_behind", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("step", [6, 8, 12])
def test_it_ends_before_anything_of_the_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, value: float, reads_behind: int
) -> None:
    """In between two checkpoints, at one, and at the end."""
    clip, calls = DdpEngine.clip, list[int]()

    def poisoned(engine: DdpEngine, *given: Any) -> Tensor:
        calls.append(1)
        if len(calls) == step:
            next(one.grad for one in engine.model.parameters() if one.grad is not None).view(-1)[0] = value
        return clip(engine, *given)

    monkeypatch.setattr(DdpEngine, "clip", poisoned)
    config = experiment(train__length="12 steps", checkpoint__every="4 steps", checkpoint__keep=9)
    with pytest.raises(
        UserError, match=rf"^training has diverged: at step {step} the loss is [\d.]+, the gradient norm"
    ):
        attempt(config, tmp_path, reads_behind=reads_behind)
    saved = (step - 1) // 4 * 4
    assert [read_meta(one)["step"] for one in committed(tmp_path / "checkpoints")] == [*range(4, saved + 1, 4)]
    assert [row["step"] for row in history(tmp_path)] == [*range(1, saved + 1)]
