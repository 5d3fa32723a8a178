"""A learned router: against a dense model with masks in training, and no look ahead in evaluation."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from masking import by_masking, is_kept
from tiny import BATCH, TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.method import Dropping, LearnedRouter, Route, attach, detach, routes_along
from tokendrop.models.gpt import Gpt, rotary_angles
from tokendrop.train.device import compile_layers

EXACT = 1e-12
ROUTED = (1, 3)
WEIGHT = 0.3


def routed(**changes: object) -> tuple[Gpt, Dropping]:
    """A model whose routers score tokens apart, and on both sides of 0."""
    model = gpt(**changes)
    router = LearnedRouter(width=16, layers=ROUTED, seed=7, loss_weight=WEIGHT)
    dropping = attach(model, seed=1, routes=routes_along([(one, one) for one in ROUTED], router))
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.mul_(20)
    return model, dropping


def draw(dropping: Dropping, kept: int | dict[int, int], step: int = 3) -> None:
    dropping.draw(kept_length=kept, step=step, sample_ids=torch.arange(BATCH), sequence_length=TOKENS)


def dense(model: Gpt, ids_BS: Tensor, kept: dict[int, int] | None) -> tuple[Tensor, Tensor]:
    """Hidden states and the router's loss, with all tokens run through all layers.

    Args:
        kept: tokens that go through each routed layer; None for those that score above 0.
    """
    x_BSD, rotary = model.tokens(ids_BS), None
    if model.positions is None:
        rotary = rotary_angles(TOKENS, 8, x_BSD)
    else:
        x_BSD = x_BSD + model.positions.weight[:TOKENS]
    loss = torch.zeros((), dtype=torch.float64)
    for number, block in enumerate(model.blocks):
        if number not in ROUTED:
            x_BSD = block(x_BSD, rotary)
            continue
        score = model.router.scores[f"{number}"]
        logits_BS = (x_BSD @ score.weight[0]) + score.bias
        runs_BS = logits_BS > 0 if kept is None else is_kept(logits_BS.topk(kept[number], dim=1).indices, TOKENS)
        out_BSD = by_masking(block, x_BSD, runs_BS, rotary)
        x_BSD = torch.where(runs_BS[..., None], x_BSD + (out_BSD - x_BSD) * logits_BS.sigmoid()[..., None], x_BSD)
        p_BS = logits_BS.sigmoid()
        loss = loss - WEIGHT * torch.where(runs_BS, p_BS, 1 - p_BS).log().mean()
    return model.norm(x_BSD), loss


@given(kept=st.lists(st.integers(1, TOKENS), min_size=2, max_size=2), seed=st.integers(0, 99))
@settings(max_examples=4)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_in_training_it_is_a_dense_model_with_masks_and_weights(
    positions: str, recompute: bool, kept: list[int], seed: int
) -> None:
    model, dropping = routed(positions=positions, recompute=recompute)
    some = dict(zip(ROUTED, kept, strict=True))
    draw(dropping, some)
    ids_BS, labels_BS = token_rows(seed=seed)
    assume(bool((ids_BS[:, 0] != ids_BS[:, 1]).all()))  # else rotary positions give both one score, but for rounding
    loss, added = model(ids_BS, labels_BS), dropping.added_loss()
    found = gradients(model, loss + added)

    plain = copy.deepcopy(model)
    detach_keeping_router(plain)
    hidden_BSD, expected_added = dense(plain, ids_BS, some)
    logits = hidden_BSD @ plain.tokens.weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(added, expected_added, rtol=EXACT, atol=EXACT)
    assert_same(found, gradients(plain, expected + expected_added), tolerance=EXACT)
    assert all(found[name].any() for name in found if name.startswith("router."))


def detach_keeping_router(model: Gpt) -> None:
    router = model.router
    detach(model)
    model.add_module("router", router)


def test_what_is_not_chosen_leaves_a_layer_as_it_came() -> None:
    model, dropping = routed()
    draw(dropping, 5)
    x_BSD = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64)
    for training in (True, False):
        model.train(training)
        out_BSD = model.blocks[1](x_BSD)
        same_BS = (out_BSD == x_BSD).all(-1)
        logits_BS = model.router.logits(1, x_BSD)
        runs_BS = is_kept(logits_BS.topk(5, dim=1).indices, TOKENS) if training else logits_BS > 0
        assert torch.equal(same_BS, ~runs_BS)
        assert 0 < int(runs_BS.sum()) < runs_BS.numel()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_layer_gives_the_same_gradients_or_is_refused(reentrant: bool) -> None:
    def run(model: Gpt, *, recompute: bool) -> Tensor:
        x_BSD = model.tokens(token_rows()[0]) + model.positions.weight[:TOKENS]
        for block in model.blocks:
            x_BSD = checkpoint(block, x_BSD, use_reentrant=reentrant) if recompute else block(x_BSD)
        return model.norm(x_BSD).square().mean()

    (plain, dropping), (wrapped, of_wrapped) = routed(positions="learned"), routed(positions="learned")
    for one in (dropping, of_wrapped):
        draw(one, 5)
    expected = gradients(plain, run(plain, recompute=False) + dropping.added_loss())
    loss = run(wrapped, recompute=True)
    if reentrant:
        with pytest.raises(ValueError, match="use_reentrant=False"):
            of_wrapped.added_loss()
    else:
        assert_same(gradients(wrapped, loss + of_wrapped.added_loss()), expected, tolerance=EXACT)


def test_of_equal_scores_the_first_tokens_are_chosen() -> None:
    model, dropping = routed()
    torch.nn.init.zeros_(model.router.scores["1"].weight)
    draw(dropping, 5)
    x_BSD = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64)
    assert ((model.blocks[1](x_BSD) != x_BSD).any(-1) == (torch.arange(TOKENS) < 5)).all()


@given(seed=st.integers(0, 99), place=st.integers(1, TOKENS - 1))
@settings(max_examples=8)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_in_evaluation_no_later_token_changes_an_output(positions: str, seed: int, place: int) -> None:
    model, _ = routed(positions=positions)
    model.eval()
    (one_BS, _), (other_BS, _) = token_rows(seed=seed), token_rows(seed=seed + 1000)
    changed_BS = torch.cat([one_BS[:, :place], other_BS[:, place:]], dim=1)
    hidden_BSD = model.hidden(one_BS)
    torch.testing.assert_close(hidden_BSD, dense(model, one_BS, None)[0], rtol=EXACT, atol=EXACT)
    for other in (model.hidden(changed_BS), model.hidden(one_BS[:, :place])):
        torch.testing.assert_close(other[:, :place], hidden_BSD[:, :place], rtol=EXACT, atol=EXACT)


def test_in_training_later_tokens_do_change_outputs() -> None:
    """So that the law above says something: a choice among all tokens looks ahead."""
    model, dropping = routed()
    draw(dropping, 5)
    ids_BS, other_BS = token_rows(seed=1)[0], token_rows(seed=2)[0]
    changed_BS = torch.cat([ids_BS[:, :8], other_BS[:, 8:]], dim=1)
    assert not torch.allclose(model.hidden(ids_BS)[:, :8], model.hidden(changed_BS)[:, :8])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_texts_that_share_a_row_get_the_outputs_that_they_have_alone(positions: str) -> None:
    """As lm-eval's choices do: a mask says who sees whom."""
    model, _ = routed(positions=positions)
    model.eval()
    ids_BS = token_rows()[0]
    shared, first, second = range(6), range(6, 10), range(10, TOKENS)
    positions_S = torch.tensor([*shared, *first, *(place - 4 for place in second)])
    sees_SS = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    sees_SS[10:, 6:10] = False
    found_BSD = model.hidden_branches(ids_BS, positions_S.expand(BATCH, -1), sees_SS.expand(BATCH, -1, -1))
    one, two = model.hidden(ids_BS[:, :10]), model.hidden(torch.cat([ids_BS[:, :6], ids_BS[:, 10:]], dim=1))
    torch.testing.assert_close(found_BSD[:, :10], one, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found_BSD[:, 10:], two[:, 6:], rtol=EXACT, atol=EXACT)


def test_a_model_that_no_token_goes_through_is_the_model_without_those_layers() -> None:
    model, _ = routed()
    model.eval()
    for score in model.router.scores.values():
        torch.nn.init.zeros_(score.weight)
        torch.nn.init.constant_(score.bias, -1.0)
    ids_BS = token_rows()[0]
    found_BSD = model.hidden(ids_BS)
    model.blocks = torch.nn.ModuleList([model.blocks[0], model.blocks[2]])
    torch.testing.assert_close(found_BSD, model.hidden(ids_BS), rtol=EXACT, atol=EXACT)


def test_detach_takes_the_router_away_and_leaves_the_rest_as_it_was() -> None:
    model, _ = routed()
    detach(model)
    assert_same(dict(model.state_dict()), dict(gpt().state_dict()))
    assert type(model.blocks[1]) is type(gpt().blocks[1])


def test_its_first_weights_are_those_of_their_seed() -> None:
    same = [LearnedRouter(width=16, layers=ROUTED, seed=seed, loss_weight=1.0).state_dict() for seed in (3, 3, 4)]
    assert_same(same[0], same[1])
    assert not torch.equal(same[0]["scores.1.weight"], same[2]["scores.1.weight"])
    assert not torch.equal(same[0]["scores.1.weight"], same[0]["scores.3.weight"])


def test_its_scores_are_not_rounded_by_autocast() -> None:
    model, _ = routed(dtype=torch.float32)
    x_BSD = torch.randn(BATCH, TOKENS, 16)
    score = model.router.scores["1"]
    with torch.autocast("cpu", torch.bfloat16):
        found_BS, rounded_BS = model.router.logits(1, x_BSD), score(x_BSD)[..., 0]
    assert torch.equal(found_BS, score(x_BSD)[..., 0])
    assert rounded_BS.dtype == torch.bfloat16


def test_a_copy_has_a_router_of_its_own() -> None:
    model, dropping = routed()
    draw(dropping, 5)
    model(*token_rows())
    other = copy.deepcopy(model)
    assert other.router is not model.router
    other.eval()
    before = model.eval().hidden(token_rows()[0])
    torch.nn.init.constant_(model.router.scores["1"].bias, 100.0)
    assert torch.equal(other.hidden(token_rows()[0]), before)
    assert not torch.equal(model.hidden(token_rows()[0]), before)


def test_compiled_layers_give_the_same_gradients_and_the_same_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **more: compiler(*args, **{**more, "backend": "eager"}))
    torch._dynamo.reset()
    (eager, theirs), (compiled, ours) = routed(), routed()
    compile_layers(compiled.blocks)
    for step, kept in enumerate([5, TOKENS, 7, 9, 4]):
        rows = token_rows(seed=step)
        found = []
        for model, dropping in ((eager, theirs), (compiled, ours)):
            model.train()
            draw(dropping, kept, step)
            loss = model(*rows)
            found.append(gradients(model, loss + dropping.added_loss()))
        assert_same(*found, tolerance=EXACT)
        with torch.no_grad():
            one, two = (model.eval().hidden(rows[0]) for model in (eager, compiled))
        torch.testing.assert_close(one, two, rtol=EXACT, atol=EXACT)
    torch._dynamo.reset()


def test_what_does_not_fit_is_refused() -> None:
    router = LearnedRouter(width=16, layers=(1,), seed=1, loss_weight=1.0)
    other = LearnedRouter(width=16, layers=(2,), seed=1, loss_weight=1.0)
    with pytest.raises(ValueError, match="want a learned router on single layers, got the layers 1 to 2"):
        attach(gpt(), seed=1, routes=[Route(first=1, last=2, select=router)])
    with pytest.raises(ValueError, match="want one learned router"):
        attach(gpt(), seed=1, routes=[Route(first=1, last=1, select=router), Route(first=2, last=2, select=other)])
    model, dropping = routed()
    with pytest.raises(ValueError, match=rf"want kept lengths in 1\.\.{TOKENS}"):
        draw(dropping, TOKENS + 1)
    with pytest.raises(ValueError, match="want no `always`"):
        dropping.draw(kept_length=4, step=0, sample_ids=[1], sequence_length=TOKENS, always=[0])
    draw(dropping, 9)
    with pytest.raises(ValueError, match="want at least 9 tokens, as drawn, layer 1 got 8"):
        model(token_rows()[0][:, :8], token_rows()[1][:, :8])
