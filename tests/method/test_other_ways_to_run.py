"""Other people's models, compiled as a whole and in several processes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from groups import together
from other_models import BATCH, MODELS, inputs, run
from tiny import assert_same, gradients
from tokendrop.method import Dropping, attach

EXACT = 1e-12  # float64; the order of additions may differ
STEPS = 3


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def draw(dropping: Dropping, name: str, ids: list[int], *, kept: int, step: int) -> None:
    other = MODELS[name]
    dropping.draw(kept_length=kept, step=step, sample_ids=ids, sequence_length=other.tokens, always=range(other.prefix))


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("name", ["gpt2", long("llama"), long("qwen3"), long("bert"), long("vit"), "rope vit"])
def test_a_model_compiled_as_a_whole_follows_each_draw(name: str) -> None:
    """Of equal kept lengths too, and of a shorter one after the full length."""
    eager, whole, full = MODELS[name].model(), MODELS[name].model(), MODELS[name].tokens
    drops = [attach(model, seed=1) for model in (eager, whole)]
    compiled, batch = torch.compile(whole, backend="eager"), inputs(name)
    for step, kept in enumerate([5, 5, 7, full, 5, 8]):
        for dropping in drops:
            draw(dropping, name, list(range(BATCH)), kept=kept, step=step)
        loss, expected = run(name, compiled, batch)[0], run(name, eager, batch)[0]
        torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
        assert_same(gradients(whole, loss), gradients(eager, expected), tolerance=EXACT)


def some(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in batch.items()}


def train(name: str, model: nn.Module, dropping: Dropping, rows: slice, ranks: int) -> list[float]:
    """Losses of some optimizer steps on this process's rows of one batch of all."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        batch = {key: torch.cat([value, value.flip(0)])[:4] for key, value in inputs(name, seed=step).items()}
        draw(dropping, name, list(range(4 * step, 4 * step + 4))[rows], kept=5, step=step)
        loss = run(name, model, some(batch, rows))[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        if ranks > 1:
            torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    return losses


def train_as_one_of_two(name: str, first_attached: bool, expected: list[float], weights: dict[str, Tensor]) -> None:
    model = MODELS[name].model()
    if first_attached:
        dropping = attach(model, seed=1)
    wrapped = DistributedDataParallel(model)
    if not first_attached:
        dropping = attach(wrapped, seed=1)
    rank = torch.distributed.get_rank()
    losses = train(name, wrapped, dropping, slice(2 * rank, 2 * rank + 2), ranks=2)
    torch.testing.assert_close(losses, expected, rtol=EXACT, atol=EXACT)
    assert_same(dict(model.state_dict()), weights, tolerance=EXACT)


@pytest.mark.parametrize(
    ("name", "first_attached"), [("llama", True), long("qwen3", True), long("bert", False), long("rope vit", True)]
)
def test_two_processes_train_as_one_does(name: str, first_attached: bool) -> None:
    model = MODELS[name].model()
    expected = train(name, model, attach(model, seed=1), slice(0, 4), ranks=1)
    together(2, train_as_one_of_two, name, first_attached, expected, dict(model.state_dict()))
