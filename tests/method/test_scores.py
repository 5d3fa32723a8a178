"""Running scores of tokens: the same at any split, and what TokenBypass keeps by them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from masking import loss_by_masking
from tiny import BATCH, TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.config.drop import TokenBypass
from tokendrop.method import Dropping, TokenScores, attach, routes_along

EXACT = 1e-12
VOCAB, LAYERS = 50, 6
IDS = torch.arange(BATCH) + 70
Labelled = tuple[Tensor, Tensor]


@st.composite
def micro_batches(draw: st.DrawFn, number: int = 4) -> list[Labelled]:
    """Labels, of which some don't count, and losses, some of them beyond all bounds."""
    ids = st.lists(st.integers(-1, VOCAB - 1), min_size=6, max_size=6)
    losses = st.lists(st.floats(0, 50, width=32) | st.sampled_from([1e9, float("inf")]), min_size=6, max_size=6)
    return [(torch.tensor(draw(ids)).view(2, 3), torch.tensor(draw(losses)).view(2, 3).float()) for _ in range(number)]


def after(steps: list[list[Labelled]], workers: int = 1) -> Tensor:
    """Scores after some steps, whose micro batches so many workers share."""
    all_scores = [TokenScores(VOCAB, beta=0.9) for _ in range(workers)]
    for step in steps:
        for number, micro_batch in enumerate(step):
            all_scores[number % workers].add(*micro_batch)
        total = torch.stack([scores._sums_2V for scores in all_scores]).sum(0)
        for scores in all_scores:
            scores.end_step(lambda sums, total=total: sums.copy_(total))
    states = [scores.state()["token_scores"] for scores in all_scores]
    assert all(torch.equal(state, states[0]) for state in states)
    return states[0]


@given(steps=st.lists(micro_batches(), min_size=1, max_size=3), data=st.data())
def test_neither_world_size_nor_order_nor_split_changes_a_bit(steps: list[list[Labelled]], data: st.DataObject) -> None:
    expected = after(steps)
    for workers in (2, 4):
        assert torch.equal(after(steps, workers), expected)
    shuffled = [data.draw(st.permutations(step)) for step in steps]
    assert torch.equal(after(shuffled), expected)
    split = [[(ids[row], losses[row]) for ids, losses in step for row in range(2)] for step in steps]
    assert torch.equal(after(split, 2), expected)


@given(steps=st.lists(micro_batches(2), min_size=1, max_size=3))
def test_a_score_is_the_running_mean_of_its_tokens_mean_losses(steps: list[list[Labelled]]) -> None:
    expected = dict.fromkeys(range(VOCAB), 10.0)
    for step in steps:
        for token in range(VOCAB):
            seen = [min(loss, 1000.0) for ids, losses in step for loss in losses[ids == token].tolist()]
            if seen:
                expected[token] = 0.9 * expected[token] + 0.1 * sum(seen) / len(seen)
    assert after(steps).tolist() == pytest.approx(list(expected.values()), abs=1e-6)


@given(steps=st.lists(micro_batches(), min_size=3, max_size=3), at=st.integers(0, 3))
def test_scores_go_on_from_their_state(steps: list[list[Labelled]], at: int) -> None:
    first, second = TokenScores(VOCAB, beta=0.9), TokenScores(VOCAB, beta=0.9)
    for scores, some in ((first, steps[:at]), (second, steps[at:])):
        if scores is second:
            second.load(first.state())
        for step in some:
            for micro_batch in step:
                scores.add(*micro_batch)
            scores.end_step()
    assert torch.equal(second.state()["token_scores"], after(steps))


def bypass(model: torch.nn.Module, method: TokenBypass) -> Dropping:
    return attach(model, seed=1, routes=routes_along(method.spans(LAYERS), method.selector()))


def draw(dropping: Dropping, kept: int, scores: Tensor, *, step: int = 3) -> None:
    dropping.draw(kept_length=kept, step=step, sample_ids=IDS, sequence_length=TOKENS, scores=scores)


@given(kept=st.integers(1, TOKENS), steps=st.lists(micro_batches(), max_size=2), step=st.integers(0, 10**6))
@settings(max_examples=6)
def test_training_is_that_of_a_dense_model_whose_easiest_tokens_are_hidden(
    kept: int, steps: list[list[Labelled]], step: int
) -> None:
    method = TokenBypass()
    dropped, plain = gpt(layers=LAYERS), gpt(layers=LAYERS)
    dropping, scores, rows = bypass(dropped, method), method.scores(VOCAB), token_rows()
    scores.load({"token_scores": after(steps)})
    draw(dropping, kept, scores.of(rows[0]), step=step)
    loss = dropped(*rows)
    if kept == TOKENS:
        assert torch.equal(loss, plain(*rows))
        return
    routes = routes_along(method.spans(LAYERS))
    expected = loss_by_masking(plain, routes, dropping, rows)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert_same(gradients(dropped, loss), gradients(plain, expected), tolerance=EXACT)
    worth = scores.of(rows[0])
    for row, stay in zip(worth, dropping.kept(2), strict=True):
        left = [place for place in range(TOKENS) if place not in stay.tolist()]
        assert row[stay].min() >= row[left].max()


@given(st.lists(st.integers(0, 9), min_size=TOKENS, max_size=TOKENS), st.integers(6, TOKENS - 6))
def test_special_tokens_stay_first_and_padding_leaves_first(ids: list[int], kept: int) -> None:
    scores = TokenBypass(special_tokens=(7,), padding_tokens=(0,)).scores(10)
    dropping = bypass(gpt(layers=LAYERS), TokenBypass())
    draw(dropping, kept, scores.of(torch.tensor([ids] * BATCH)))
    for stay in dropping.kept(2).tolist():
        chosen = [ids[place] for place in stay]
        assert chosen.count(7) == min(kept, ids.count(7))
        assert chosen.count(0) == max(0, kept - (TOKENS - ids.count(0)))


def test_at_first_when_all_scores_are_equal_tokens_are_drawn() -> None:
    dropping, scores = bypass(gpt(layers=LAYERS), TokenBypass()), TokenScores(VOCAB)
    often = torch.zeros(TOKENS)
    for step in range(400):
        draw(dropping, 4, scores.of(token_rows()[0]), step=step)
        often += torch.bincount(dropping.kept(2).flatten(), minlength=TOKENS)
    assert (often / (400 * BATCH) - 0.25).abs().max() < 0.07


def test_the_span_is_the_papers_unless_it_is_given() -> None:
    """Of BERT's 12 layers those from the 6th on, the last one left out: the released code's and random-LTD's L/2."""
    assert TokenBypass().spans(12) == ((5, 10),)
    assert TokenBypass().spans(24) == ((11, 22),)
    assert TokenBypass(first=1, last=3).spans(12) == ((1, 3),)
    with pytest.raises(ValueError, match="want first <= last of 4 layers"):
        TokenBypass(first=3, last=1).spans(4)


def test_mistakes_are_named(complaint) -> None:
    with pytest.raises(ValueError, match="beta: want at least 0 and less than 1"):
        TokenBypass(beta=1.0)
    with pytest.raises(ValueError, match=r"want numbers of tokens in 0\.\.49, got \[50\]"):
        TokenScores(VOCAB, special_tokens=[50])
    with pytest.raises(ValueError, match=r"want scores of 50 tokens, got \(3,\)"):
        TokenScores(VOCAB).load({"token_scores": torch.zeros(3)})
    scores = TokenScores(VOCAB)
    scores.add(torch.tensor([1]), torch.tensor([2.0]))
    with pytest.raises(ValueError, match=r"call end_step\(\) first"):
        scores.state()
    job = Path(__file__).parents[2] / "jobs" / "pretrain" / "bench.yaml"
    said = complaint("plan", job, "drop={method: token_bypass, special_tokens: [7, -1]}")
    assert "drop.special_tokens: want numbers of tokens in 0.." in said
    said = complaint("plan", job, "drop={method: token_bypass, special_tokens: [7], padding_tokens: [7]}")
    assert "drop.padding_tokens: [7] are special_tokens too" in said
