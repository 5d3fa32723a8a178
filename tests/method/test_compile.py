"""torch.compile sees two training graphs, whatever the kept lengths; graphs beyond its limit are an error."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from tiny import BATCH, TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.method import attach, detach
from tokendrop.models.layer import recompute_layers
from tokendrop.train.device import compile_layers

KEPT_LENGTHS = [4, 6, 5, 9, TOKENS, 12, 7, 3, 10, 11, 8, 13, 14, TOKENS, 2]
EXACT = 1e-12  # float64


class CountingBackend:
    """Runs what dynamo captured as it is, and counts how often dynamo captured something."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingBackend]:
    """What `Module.compile` compiles with during the test; dynamo starts and ends empty."""
    counting = CountingBackend()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):  # put back whatever compile_layers sets
        yield counting
    torch._dynamo.reset()


def train_through(model: nn.Module, kept_lengths: list[int]) -> list[dict[str, Tensor]]:
    """Gradients of a step at each kept length."""
    dropping = attach(model, seed=1)
    found = []
    for step, kept in enumerate(kept_lengths):
        dropping.draw(kept_length=kept, step=step, sample_ids=torch.arange(BATCH), sequence_length=TOKENS)
        found.append(gradients(model, model(*token_rows(seed=step))))
    return found


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_many_kept_lengths_make_two_training_graphs(backend: CountingBackend, positions: str) -> None:
    model = gpt(positions=positions)
    compile_layers(model.blocks)
    compiled = train_through(model, KEPT_LENGTHS)
    assert backend.graphs == 2

    eager = train_through(gpt(positions=positions), KEPT_LENGTHS)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert_same(ours, theirs, tolerance=EXACT)


def test_without_drops_there_is_one_training_graph(backend: CountingBackend) -> None:
    model = gpt()
    compile_layers(model.blocks)
    train_through(model, [TOKENS, TOKENS])
    assert backend.graphs == 1


def test_recomputed_layers_make_no_more_graphs_and_equal_gradients(backend: CountingBackend) -> None:
    model = gpt(recompute=True)
    compile_layers(model.blocks)
    compiled = train_through(model, KEPT_LENGTHS[:6])
    assert backend.graphs == 2
    for ours, theirs in zip(compiled, train_through(gpt(), KEPT_LENGTHS[:6]), strict=True):
        assert_same(ours, theirs, tolerance=EXACT)


def test_layers_that_are_computed_again_from_a_step_on_make_one_more_graph(backend: CountingBackend) -> None:
    model, eager = gpt(), gpt()
    compile_layers(model.blocks)
    for again, graphs in ((False, 2), (True, 3), (False, 3)):
        recompute_layers(model, again=again)
        found = train_through(model, KEPT_LENGTHS[:6])
        assert backend.graphs == graphs
        for ours, theirs in zip(found, train_through(eager, KEPT_LENGTHS[:6]), strict=True):
            assert_same(ours, theirs, tolerance=EXACT)
        detach(model)
        detach(eager)


def test_more_graphs_than_allowed_stop_the_run(backend: CountingBackend) -> None:
    model = gpt()
    with torch._dynamo.config.patch(recompile_limit=1):
        compile_layers(model.blocks)
        with pytest.raises(FailOnRecompileLimitHit):
            train_through(model, [4, 6])
