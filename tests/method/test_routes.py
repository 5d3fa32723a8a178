"""Routes: spans of layers that tokens pass by, whoever chooses them."""

import copy
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from masking import is_kept, loss_by_masking
from tiny import BATCH, TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.method import DrawContext, Dropping, HighestScore, Route, Uniform, attach, detach, dropping_of

EXACT = 1e-12  # float64; the order of additions may differ
IDS = torch.arange(BATCH) + 70
LAYERS = 6


@st.composite
def some_routes(draw: st.DrawFn) -> list[Route]:
    """Routes apart from each other, over some of six layers."""
    edges = sorted(draw(st.sets(st.integers(0, LAYERS), min_size=2)))
    spans = [(a, b - 1) for a, b in pairwise(edges)]
    chosen = draw(st.lists(st.sampled_from(spans), unique=True, min_size=1))
    return [Route(first=first, last=last) for first, last in chosen]


def draw(dropping: Dropping, kept: int | dict[int, int], *, step: int = 3, **more: object) -> None:
    dropping.draw(kept_length=kept, step=step, sample_ids=IDS, sequence_length=TOKENS, **more)


@given(routes=some_routes(), kept=st.integers(1, TOKENS), step=st.integers(0, 10**6))
@settings(max_examples=10)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_routes_are_layers_whose_dropped_tokens_are_hidden_and_put_back(
    positions: str, recompute: bool, routes: list[Route], kept: int, step: int
) -> None:
    dropped = gpt(positions=positions, layers=LAYERS, recompute=recompute)
    plain = gpt(positions=positions, layers=LAYERS)
    dropping = attach(dropped, seed=1, routes=routes)
    draw(dropping, kept, step=step)
    rows = token_rows()
    loss, expected = dropped(*rows), loss_by_masking(plain, routes, dropping, rows)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert_same(gradients(dropped, loss), gradients(plain, expected), tolerance=EXACT)


@given(routes=some_routes(), step=st.integers(0, 10**6))
@settings(max_examples=15)
def test_all_tokens_along_a_route_are_the_plain_model_bit_for_bit(routes: list[Route], step: int) -> None:
    dropped, plain = (gpt(layers=LAYERS, dtype=torch.float32) for _ in range(2))
    dropping = attach(dropped, seed=1, routes=routes)
    draw(dropping, TOKENS - 1, step=step)
    everything_BK = torch.arange(TOKENS).expand(BATCH, TOKENS)
    dropping._kept = {
        route.first: everything_BK for route in dropping.routes
    }  # `draw` itself leaves gather and combine out
    rows = token_rows()
    loss, expected = dropped(*rows), plain(*rows)
    assert torch.equal(loss, expected)
    assert_same(gradients(dropped, loss), gradients(plain, expected))


def test_the_routes_of_random_ltd_are_those_that_attach_takes_by_itself() -> None:
    by_default, by_routes = gpt(), gpt()
    dropping = attach(by_default, seed=1)
    same = attach(by_routes, seed=1, routes=[Route(first=layer, last=layer, select=Uniform()) for layer in (1, 2)])
    draw(dropping, 5)
    draw(same, 5)
    assert torch.equal(by_default(*token_rows()), by_routes(*token_rows()))
    assert dropping.routes == same.routes


def test_a_span_has_one_draw_and_each_layer_of_it_sees_as_many_tokens() -> None:
    model = gpt(layers=LAYERS)
    dropping = attach(model, seed=1, routes=[Route(first=1, last=-2)])
    draw(dropping, 5)
    seen: dict[int, int] = {}
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: args[0].shape[1]}))
    model(*token_rows())
    assert seen == {0: TOKENS, 1: 5, 2: 5, 3: 5, 4: 5, 5: TOKENS}
    assert dropping.layers == (1, 2, 3, 4)
    assert all(dropping.kept(number) is dropping.kept(1) for number in dropping.layers)


def test_routes_keep_lengths_of_their_own() -> None:
    model = gpt(layers=LAYERS)
    dropping = attach(model, seed=1, routes=[Route(first=0, last=1), Route(first=3, last=3), Route(first=4, last=5)])
    draw(dropping, {0: 4, 3: TOKENS, 4: 9})
    lengths = [kept.shape[1] if (kept := dropping.kept(number)) is not None else TOKENS for number in range(LAYERS)]
    assert lengths == [4, 4, TOKENS, TOKENS, 9, 9]


@given(st.integers(1, TOKENS), st.integers(0, 100), st.data())
def test_tokens_that_always_stay_do_so_and_the_others_are_drawn(kept: int, step: int, data: st.DataObject) -> None:
    always_BS = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    for row in always_BS:
        row[data.draw(st.lists(st.integers(0, TOKENS - 1), max_size=kept))] = True
    dropping = attach(gpt(), seed=1)
    draw(dropping, kept, step=step, always=always_BS)
    if kept < TOKENS:
        kept_BK = dropping.kept(1)
        assert (is_kept(kept_BK, TOKENS) | ~always_BS).all()
        assert (kept_BK.diff() > 0).all()
        assert kept_BK.shape == (BATCH, kept)


def test_positions_that_always_stay_may_be_named() -> None:
    dropping = attach(gpt(), seed=1)
    for step in range(20):
        draw(dropping, 2, step=step, always=[0])
        assert (dropping.kept(1)[:, 0] == 0).all()


@pytest.mark.parametrize("select", [Uniform(), HighestScore()])
def test_more_tokens_that_always_stay_than_are_kept_are_refused(select: Uniform | HighestScore) -> None:
    dropping = attach(gpt(), seed=1, routes=[Route(first=1, last=1, select=select)])
    with pytest.raises(ValueError, match="want kept lengths of at least 3, the tokens that always stay"):
        draw(dropping, 2, always=[0, 1, 5], scores=torch.zeros(BATCH, TOKENS))


@pytest.mark.parametrize("select", [Uniform(), HighestScore()])
@pytest.mark.parametrize("kept", [0, TOKENS + 1])
def test_kept_lengths_that_no_sequence_has_are_refused(select: Uniform | HighestScore, kept: int) -> None:
    dropping = attach(gpt(), seed=1, routes=[Route(first=1, last=1, select=select)])
    with pytest.raises(ValueError, match=rf"want kept lengths in 1\.\.{TOKENS}, got \[{kept}\]"):
        draw(dropping, kept, scores=torch.zeros(BATCH, TOKENS))


@given(st.lists(st.integers(-3, 3), min_size=TOKENS, max_size=TOKENS), st.integers(1, TOKENS - 1))
def test_the_highest_scores_stay_and_equal_ones_are_drawn_by_their_hashes(scores: list[int], kept: int) -> None:
    select = HighestScore()
    dropping = attach(
        gpt(), seed=1, routes=[Route(first=1, last=1, select=select), Route(first=2, last=2, select=select)]
    )
    draw(dropping, kept, scores=torch.tensor([scores] * BATCH, dtype=torch.float32))
    for layer in (1, 2):
        for places in dropping.kept(layer).tolist():
            assert places == sorted(set(places))
            assert sorted(scores[place] for place in places) == sorted(scores)[-kept:]
    uniform = attach(gpt(), seed=1, routes=[Route(first=1, last=1)])
    draw(uniform, kept)
    draw(dropping, kept, scores=torch.zeros(BATCH, TOKENS))
    assert torch.equal(dropping.kept(1), uniform.kept(1))


@dataclass(frozen=True)
class Chosen:
    """A selector of the user's own, that gives what it is made with."""

    positions_BK: Tensor

    def select(self, draw: DrawContext, layers: Sequence[int], kept: Sequence[int]) -> list[Tensor]:
        return [self.positions_BK for _ in layers]


FIRST_4 = torch.arange(4).expand(BATCH, 4)


@pytest.mark.parametrize(
    ("positions_BK", "said"),
    [
        (FIRST_4.flip(1), "other positions than ascending ones"),
        (FIRST_4 + 1, "left out tokens that always stay"),
        (FIRST_4 + TOKENS - 3, "in 0.."),
        (FIRST_4 - 1, "in 0.."),
        (torch.tensor([0, 1, 1, 2]).expand(BATCH, 4), "each once"),
        (FIRST_4[:, :3], r"want torch\.int64 \(3, 4\)"),
        (FIRST_4[:1], r"want torch\.int64 \(3, 4\)"),
        (FIRST_4.int(), r"positions of torch\.int32 \(3, 4\)"),
    ],
    ids=["descending", "no always", "beyond", "below", "twice", "too few", "one sequence", "int32"],
)
def test_what_a_selector_must_not_choose_is_refused(positions_BK: Tensor, said: str) -> None:
    dropping = attach(gpt(), seed=1, routes=[Route(first=1, last=2, select=Chosen(FIRST_4))])
    draw(dropping, 4, always=[0])
    assert torch.equal(dropping.kept(1), FIRST_4)
    dropping = attach(gpt(), seed=1, routes=[Route(first=1, last=2, select=Chosen(positions_BK))])
    with pytest.raises(ValueError, match=said):
        draw(dropping, 4, always=[0])


def test_scores_that_are_missing_are_asked_for() -> None:
    with pytest.raises(ValueError, match="want scores_BS"):
        draw(attach(gpt(), seed=1, routes=[Route(first=1, last=2, select=HighestScore())]), 4)


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ([Route(first=2, last=1)], "want first <= last of 4 layers, got 2 and 1"),
        ([Route(first=0, last=4)], "got 0 and 4"),
        ([Route(first=0, last=2), Route(first=2, last=3)], "layer 2 is in two of them"),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes: list[Route], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attach(gpt(), seed=1, routes=routes)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_each_layer_of_a_span_gives_the_same_gradients_or_is_refused(reentrant: bool) -> None:
    plain, wrapped = gpt(layers=LAYERS), gpt(layers=LAYERS)
    for model in (plain, wrapped):
        draw(attach(model, seed=1, routes=[Route(first=1, last=3)]), 5)

    def run(model: nn.Module, *, recompute: bool) -> Tensor:
        x_BSD = model.tokens(token_rows()[0]) + model.positions.weight[:TOKENS]
        for block in model.blocks:
            x_BSD = checkpoint(block, x_BSD, use_reentrant=reentrant) if recompute else block(x_BSD)
        return model.norm(x_BSD).square().mean()

    expected = gradients(plain, run(plain, recompute=False))
    loss = run(wrapped, recompute=True)
    if reentrant:
        with pytest.raises(ValueError, match="use_reentrant=False"):
            loss.backward()
    else:
        assert_same(gradients(wrapped, loss), expected, tolerance=EXACT)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_dropped_model_drops_by_draws_of_its_own(copied) -> None:
    model = gpt()
    dropping = attach(model, seed=1)
    draw(dropping, 5)
    model(*token_rows())
    other = copied(model)
    theirs = dropping_of(other)
    assert theirs is not dropping
    assert theirs.kept(1) is None
    draw(theirs, 5)
    assert torch.equal(other(*token_rows()), model(*token_rows()))
    draw(theirs, 4)
    assert dropping.kept(1).shape == (BATCH, 5)
    detach(other)
    with pytest.raises(ValueError, match="attach"):
        dropping_of(other)
    assert type(other.blocks[1]) is type(gpt().blocks[1])


def test_a_model_that_trains_without_a_draw_says_so_once() -> None:
    model = gpt()
    dropping = attach(model, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(*token_rows())
    with pytest.warns(UserWarning, match=r"draw\(\) was never called"):
        model.train()(*token_rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(*token_rows())
        draw(dropping, 5)
        model(*token_rows())


def test_layers_of_a_sequential_are_found_where_there_is_no_module_list() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(4)))

        def forward(self, x_BSD: Tensor) -> Tensor:
            return self.blocks(x_BSD)

    model = Blocks()
    dropping = attach(model, seed=1)
    draw(dropping, 5, always=[0])
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model(torch.randn(BATCH, TOKENS, 8)).sum().backward()
    assert seen == [TOKENS, 5, 5, TOKENS]


def test_layers_that_take_the_sequence_first_are_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3)
    with pytest.raises(ValueError, match="batch_first=True"):
        attach(encoder, seed=1)
