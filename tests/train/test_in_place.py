"""The platform's own models write over what dropped layers hand on to each other, and learn the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from task_jobs import CASES
from tiny import assert_same, gpt
from tokendrop.method import Stream
from tokendrop.models.gpt import Gpt
from tokendrop.train import dropping
from tokendrop.train.dropping import attach_method, draw
from tokendrop.train.worker import build_engine

HERE = torch.device("cpu")
ALONE = sorted(
    name for name, config in CASES.items() if config.train.strategy == "ddp" and config.drop.method != "none"
)


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each layer that drops tokens writes over its input."""
    seen: list[bool] = []
    owns = Stream.owns

    def told(self: Stream, rest_BSD: Tensor) -> bool:
        seen.append(owns(self, rest_BSD))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "owns", told)
        yield seen


def gradients_of(case: str) -> tuple[dict[str, Tensor], int]:
    """Of one micro batch, in the middle of the run, and how many layers follow another that drops tokens."""
    config = CASES[case]
    config = replace(config, model=replace(config.model, layers=6))
    engine, drops = build_engine(config, HERE)
    task, plan = config.task.build(config), config.plan
    torch.manual_seed(1)
    batch = task.random_batch(config.train.micro_batch, HERE)
    if drops is not None:
        scores = config.drop.scores(config.model.vocab_size)
        draw(config, plan, drops, batch, step=2, kept=plan.at(2).kept_by_route, scores=scores)
    engine.forward_backward(batch, share=1.0, last_micro_batch=True)
    drawn = [] if drops is None else [r for r in drops.routes if isinstance(drops.kept(r.first), Tensor)]
    follow = sum(one.last + 1 == other.first for one, other in pairwise(drawn))
    return {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}, follow


@pytest.mark.parametrize("case", ALONE)
def test_in_place_no_bit_of_a_gradient_changes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(monkeypatch) as writes:
        in_place, follow = gradients_of(case)
    assert sum(writes) == follow
    assert follow == (3 if CASES[case].drop.method == "random_ltd" else 0)
    monkeypatch.setattr(dropping, "hands_on_once", lambda model: False)
    with counting(monkeypatch) as writes:
        copied, _ = gradients_of(case)
    assert not writes
    assert_same(in_place, copied)


def test_models_with_more_between_their_layers_are_copied() -> None:
    """A class of one's own may read a layer's output once more, as a skip connection does."""

    class Skips(Gpt):
        pass

    config = CASES["causal"]
    for model, in_place in ((gpt(), True), (Skips(gpt().config), False)):
        drops = attach_method(config, model, model.blocks)
        assert drops is not None
        assert (drops._stream is not None) == in_place
