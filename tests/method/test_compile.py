"""torch.compile sees three training graphs, whatever the kept lengths; graphs beyond its limit are an error."""

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils.checkpoint import checkpoint

from tiny import BATCH, TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.method import Route, attach, detach, dropping_of
from tokendrop.models.layer import recompute_layers
from tokendrop.train.device import compile_layers

KEPT_LENGTHS = [4, 6, 5, 9, TOKENS, 12, 7, 3, 10, 11, 8, 13, 14, TOKENS, 2]
EXACT = 1e-12  # float64


class CountingBackend:
    """Runs what dynamo captured as it is, and counts how often dynamo captured something."""

    def __init__(self) -> None:
        self.moves: list[int] = []
        """Gathers and combines in each graph."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        moves = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.autograd_function_apply]
        self.moves.append(len(moves))
        return graph.forward

    @property
    def graphs(self) -> int:
        return len(self.moves)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingBackend]:
    """What `Module.compile` compiles with during the test; dynamo starts and ends empty."""
    counting = CountingBackend()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):  # put back whatever compile_layers sets
        yield counting
    torch._dynamo.reset()


def dropping_gpt(*, compiled: bool = False, routes: Sequence[Route] | None = None, **changes: object) -> nn.Module:
    """A model that drops tokens, and whose layers are compiled then, as `build_engine` does it."""
    model = gpt(**changes)
    attach(model, seed=1, routes=routes)
    if compiled:
        compile_layers(model.blocks)
    return model


def train_through(model: nn.Module, kept_lengths: list[int]) -> list[dict[str, Tensor]]:
    """Gradients of a step at each kept length."""
    dropping = dropping_of(model)
    found = []
    for step, kept in enumerate(kept_lengths):
        dropping.draw(kept_length=kept, step=step, sample_ids=torch.arange(BATCH), sequence_length=TOKENS)
        found.append(gradients(model, model(*token_rows(seed=step))))
    return found


def check_same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other, tolerance=EXACT)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_full_length_the_first_kept_one_and_all_others_make_a_graph_each(
    backend: CountingBackend, positions: str
) -> None:
    compiled = train_through(dropping_gpt(positions=positions, compiled=True), KEPT_LENGTHS)
    assert backend.moves == [0, 2, 2], "gather and combine are in the graph of the layers that drop tokens"
    check_same(compiled, train_through(dropping_gpt(positions=positions), KEPT_LENGTHS))


def test_layers_that_were_compiled_before_they_drop_tokens_gather_and_combine_outside(backend: CountingBackend) -> None:
    model = gpt()
    compile_layers(model.blocks)
    attach(model, seed=1)
    check_same(train_through(model, KEPT_LENGTHS), train_through(dropping_gpt(), KEPT_LENGTHS))
    assert backend.moves == [0, 0]


def test_a_route_of_several_layers_gathers_and_combines_outside(backend: CountingBackend) -> None:
    span = [Route(first=1, last=2)]
    compiled = train_through(dropping_gpt(routes=span, compiled=True), KEPT_LENGTHS)
    assert backend.moves == [0, 0]
    check_same(compiled, train_through(dropping_gpt(routes=span), KEPT_LENGTHS))


def test_without_drops_there_is_one_training_graph(backend: CountingBackend) -> None:
    train_through(dropping_gpt(compiled=True), [TOKENS, TOKENS])
    assert backend.graphs == 1


def test_recomputed_layers_make_no_more_graphs_and_equal_gradients(backend: CountingBackend) -> None:
    compiled = train_through(dropping_gpt(recompute=True, compiled=True), KEPT_LENGTHS[:6])
    assert backend.graphs == 3
    check_same(compiled, train_through(dropping_gpt(), KEPT_LENGTHS[:6]))


def test_layers_that_are_computed_again_from_a_step_on_make_a_graph_more_of_each_kind(backend: CountingBackend) -> None:
    model, eager = dropping_gpt(compiled=True), dropping_gpt()
    for again, graphs in ((False, 3), (True, 5), (False, 5)):
        recompute_layers(model, again=again)
        found = train_through(model, KEPT_LENGTHS[:6])
        assert backend.graphs == graphs
        check_same(found, train_through(eager, KEPT_LENGTHS[:6]))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_compiled_model_is_not_compiled_and_drops_as_it_does(
    again: Callable[[nn.Module], nn.Module],
) -> None:
    model = dropping_gpt(compiled=True)
    train_through(model, [5])
    other = again(model)
    check_same(train_through(other, KEPT_LENGTHS[:3]), train_through(model, KEPT_LENGTHS[:3]))
    torch._dynamo.reset()
    counting = CountingBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=counting))
        train_through(other, [5])
    assert not counting.graphs


def test_a_compiled_model_that_drops_no_more_is_a_plain_one(backend: CountingBackend) -> None:
    model = dropping_gpt(compiled=True)
    train_through(model, [5])
    detach(model)
    plain = gpt()
    found, expected = (gradients(one, one(*token_rows())) for one in (model, plain))
    assert_same(found, expected, tolerance=EXACT)
    assert not any("_compiled_route" in vars(block) for block in model.blocks)


def test_an_activation_checkpoint_around_a_compiled_layer_notices_another_draw(backend: CountingBackend) -> None:
    model = dropping_gpt(compiled=True)
    dropping, block = dropping_of(model), model.blocks[1]
    for step, again in ((0, False), (1, True)):
        numbers = {"sample_ids": torch.arange(BATCH), "sequence_length": TOKENS, "kept_length": 5}
        dropping.draw(step=step, **numbers)
        hidden_BSD = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64, requires_grad=True)
        out_BSD = checkpoint(block, hidden_BSD, use_reentrant=False)
        if again:
            dropping.draw(step=step + 1, **numbers)
            with pytest.raises(ValueError, match="computed it again on other tokens"):
                out_BSD.sum().backward()
        else:
            out_BSD.sum().backward()
    assert backend.moves[-1] == 2


def test_layers_with_hooks_gather_and_combine_outside(backend: CountingBackend) -> None:
    """As those of FSDP, which would break the graph up."""
    model, eager = dropping_gpt(compiled=True), dropping_gpt()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: None)
    check_same(train_through(model, KEPT_LENGTHS[:4]), train_through(eager, KEPT_LENGTHS[:4]))
    assert not any(backend.moves)


def test_more_graphs_than_allowed_stop_the_run(backend: CountingBackend) -> None:
    model = dropping_gpt(compiled=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        recompute_layers(model, again=False)
        train_through(model, [4])
        recompute_layers(model, again=True)
        with pytest.raises(FailOnRecompileLimitHit):
            train_through(model, [4])
