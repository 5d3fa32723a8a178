"""The platform's own models write over what dropped layers hand on to each other, and learn the same."""

import pytest
import torch

from task_jobs import CASES
from tiny import assert_same, gpt
from tokendrop.models.gpt import Gpt
from tokendrop.train import dropping
from tokendrop.train.dropping import attach_method, draw
from tokendrop.train.worker import build_engine

HERE = torch.device("cpu")
ALONE = sorted(
    name for name, config in CASES.items() if config.train.strategy == "ddp" and config.drop.method != "none"
)


def gradients_of(case: str) -> dict[str, torch.Tensor]:
    """Of one micro batch, in the middle of the run."""
    config = CASES[case]
    engine, drops = build_engine(config, HERE)
    task, plan = config.task.build(config), config.plan
    torch.manual_seed(1)
    batch = task.random_batch(config.train.micro_batch, HERE)
    if drops is not None:
        scores = config.drop.scores(config.model.vocab_size)
        draw(config, plan, drops, batch, step=2, kept=plan.at(2).kept_by_route, scores=scores)
    engine.forward_backward(batch, share=1.0, last_micro_batch=True)
    return {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", ALONE)
def test_in_place_no_bit_of_a_gradient_changes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place = gradients_of(case)
    monkeypatch.setattr(dropping, "hands_on_once", lambda model: False)
    assert_same(in_place, gradients_of(case))


def test_models_with_more_between_their_layers_are_copied() -> None:
    """A class of one's own may read a layer's output once more, as a skip connection does."""

    class Skips(Gpt):
        pass

    config = CASES["causal"]
    for model, in_place in ((gpt(), True), (Skips(gpt().config), False)):
        drops = attach_method(config, model, model.blocks)
        assert drops is not None
        assert (drops._stream is not None) == in_place
