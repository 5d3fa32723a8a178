"""What a dropped layer computes."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from masking import by_masking
from tiny import BATCH, TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.method import Dropping, attach, combine_tokens, detach, dropper, gather_tokens
from tokendrop.method.draw import DrawContext, draw_positions
from tokendrop.models.gpt import rotary_angles

EXACT = 1e-12  # float64; the order of additions may differ
IDS = torch.arange(BATCH) + 70


def draw(dropping: Dropping, kept: int | dict[int, int], *, step: int = 3) -> None:
    dropping.draw(kept_length=kept, step=step, sample_ids=IDS, sequence_length=TOKENS)


def positions(dropping: Dropping, layer: int) -> Tensor:
    kept_BK = dropping.kept(layer)
    assert kept_BK is not None
    return kept_BK


def is_kept(kept_BK: Tensor) -> Tensor:
    return torch.zeros(len(kept_BK), TOKENS, dtype=torch.bool).scatter(1, kept_BK, True)


class Seen(nn.Module):
    """A layer that mixes all tokens that it sees, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.seen = hidden_states
        return hidden_states * self.scale + hidden_states.mean(1, keepdim=True)


@given(kept=st.integers(1, TOKENS - 1), step=st.integers(0, 10**6))
def test_kept_tokens_pass_the_layer_and_dropped_tokens_skip_it(kept: int, step: int) -> None:
    layers = nn.ModuleList([Seen()])
    dropping = attach(layers, seed=1, full_length_layers=(), blocks=list(layers))
    draw(dropping, kept, step=step)
    hidden_BSD = torch.randn(BATCH, TOKENS, 5, dtype=torch.float64)

    out_BSD = layers[0](hidden_BSD)

    kept_BS = is_kept(positions(dropping, 0))
    assert torch.equal(layers[0].seen, hidden_BSD[kept_BS].view(BATCH, kept, 5))
    detach(layers)
    assert torch.equal(out_BSD[kept_BS].view(BATCH, kept, 5), layers[0](layers[0].seen))
    assert torch.equal(out_BSD[~kept_BS], hidden_BSD[~kept_BS])


@pytest.mark.parametrize("positions_kind", ["learned", "rotary"])
@pytest.mark.filterwarnings(r"ignore:draw\(\) was never called")
@pytest.mark.parametrize("before", ["never drawn", "drawn at full length", "drawn shorter before"])
def test_at_full_length_the_model_is_the_plain_one_bit_for_bit(positions_kind: str, before: str) -> None:
    plain, dropped = (gpt(positions=positions_kind, dtype=torch.float32) for _ in range(2))
    dropping = attach(dropped, seed=1)
    if before == "drawn shorter before":
        draw(dropping, 4)
    if before != "never drawn":
        draw(dropping, TOKENS)
    rows = token_rows()
    loss, expected = dropped(*rows), plain(*rows)
    assert torch.equal(loss, expected)
    assert_same(gradients(dropped, loss), gradients(plain, expected))


def draw_all(dropping: Dropping, *, step: int) -> None:
    """Keep every token, and gather and combine them all the same: `draw` itself leaves both out."""
    context = DrawContext(seed=dropping.seed, step=step, sample_ids_B=IDS, sequence_length=TOKENS)
    full = draw_positions(context, dropping.layers, [TOKENS] * len(dropping.layers))
    draw(dropping, TOKENS - 1, step=step)
    dropping._kept = dict(zip(dropping.layers, full, strict=True))


@given(step=st.integers(0, 10**6), seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=10)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("positions_kind", ["learned", "rotary"])
def test_all_tokens_through_gather_and_combine_are_the_plain_model_bit_for_bit(
    positions_kind: str, recompute: bool, step: int, seed: int, dtype: torch.dtype
) -> None:
    plain, dropped = (gpt(positions=positions_kind, dtype=dtype, recompute=recompute) for _ in range(2))
    draw_all(attach(dropped, seed=seed, full_length_layers=()), step=step)
    rows = token_rows(seed=seed)
    passed = []
    with mock.patch.object(dropper, "combine_tokens", lambda *args: passed.append(1) or combine_tokens(*args)):
        loss = dropped(*rows)
    assert len(passed) == len(dropped.blocks)
    expected = plain(*rows)
    assert torch.equal(loss, expected)
    assert_same(gradients(dropped, loss), gradients(plain, expected))


@given(kept=st.integers(1, TOKENS - 1), step=st.integers(0, 1000))
@settings(max_examples=20)
@pytest.mark.parametrize("positions_kind", ["learned", "rotary"])
def test_causal_attention_over_kept_tokens_is_full_attention_with_dropped_keys_masked(
    positions_kind: str, kept: int, step: int
) -> None:
    model = gpt(positions=positions_kind)
    block = model.blocks[1]
    hidden_BSD = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64)
    rotary = rotary_angles(TOKENS, 8, hidden_BSD) if positions_kind == "rotary" else None
    dropping = attach(model, seed=1)
    draw(dropping, kept, step=step)
    kept_BS = is_kept(positions(dropping, 1))

    out_BSD = block(hidden_BSD, rotary)

    expected_BSD = by_masking(block, hidden_BSD, kept_BS, rotary)
    torch.testing.assert_close(out_BSD[kept_BS], expected_BSD[kept_BS], rtol=EXACT, atol=EXACT)
    assert torch.equal(out_BSD[~kept_BS], hidden_BSD[~kept_BS])


def test_every_layer_keeps_tokens_of_its_own_and_the_full_length_layers_keep_all() -> None:
    model = gpt(layers=6)
    dropping = attach(model, seed=1, full_length_layers=(0, 2, -1))
    lengths = {1: 5, 3: 9, 4: TOKENS}
    draw(dropping, lengths)
    assert dropping.layers == (1, 3, 4)
    seen = {}
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: args[0].shape[1]}))
    model(*token_rows())
    assert seen == {0: TOKENS, 1: 5, 2: TOKENS, 3: 9, 4: TOKENS, 5: TOKENS}
    draw(dropping, 5)
    assert not torch.equal(positions(dropping, 1), positions(dropping, 3))


@given(
    kept=st.integers(1, TOKENS - 1),
    step=st.integers(0, 10**6),
    whole=st.sampled_from([(), (0, -1), (1,)]),
    batch=st.integers(1, BATCH + 1),
)
@settings(max_examples=20)
@pytest.mark.parametrize("positions_kind", ["learned", "rotary"])
def test_evaluation_never_drops(positions_kind: str, kept: int, step: int, whole: tuple[int, ...], batch: int) -> None:
    """Whatever was drawn before, for batches of any size, and training goes on with the draw that it had."""
    plain, dropped = gpt(positions=positions_kind), gpt(positions=positions_kind)
    draw(attach(dropped, seed=1, full_length_layers=whole), kept, step=step)
    rows, others = token_rows(), token_rows(batch, seed=step)
    trained = dropped(*rows)
    assert not torch.equal(trained, plain(*rows))
    dropped.eval()
    assert torch.equal(dropped(*others), plain(*others))
    assert torch.equal(dropped.logits(others[0]), plain.logits(others[0]))
    dropped.train()
    assert torch.equal(dropped(*rows), trained)


def test_a_model_built_by_hand_from_gather_and_combine_has_equal_loss_and_gradients() -> None:
    """The whole model, with the layers called one by one and the public functions around each."""
    dropped, by_hand = gpt(positions="rotary"), gpt(positions="rotary")
    dropping = attach(dropped, seed=1)
    draw(dropping, 6)
    ids, labels = token_rows()

    def run(model: nn.Module) -> Tensor:
        x_BSD = model.tokens(ids)
        cos, sin = rotary_angles(TOKENS, 8, x_BSD)
        for number, block in enumerate(model.blocks):
            kept_BK = dropping.kept(number)
            if kept_BK is None:
                x_BSD = block(x_BSD, (cos, sin))
                continue
            kept, rest = gather_tokens(x_BSD, kept_BK)
            x_BSD = combine_tokens(rest, block(kept, (cos[0][kept_BK], sin[0][kept_BK])), kept_BK)
        logits = model.norm(x_BSD) @ model.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    loss, expected = dropped(ids, labels), run(by_hand)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert_same(gradients(dropped, loss), gradients(by_hand, expected), tolerance=EXACT)


@pytest.mark.parametrize("between", [None, 5, 12])
def test_activation_checkpointing_replays_the_same_drops(between: int | None) -> None:
    """Even when the next micro batch is drawn before the backward pass of this one."""
    plain, recomputed = gpt(), gpt(recompute=True)
    found = []
    for model in (plain, recomputed):
        dropping = attach(model, seed=1)
        draw(dropping, 7)
        loss = model(*token_rows())
        if between is not None:
            draw(dropping, between, step=99)
        found.append(gradients(model, loss))
    assert_same(*found, tolerance=EXACT)


def test_activation_checkpointing_replays_dropout_too() -> None:
    found = []
    for recompute in (False, True):
        model = gpt(recompute=recompute, dropout=0.3)
        draw(attach(model, seed=1), 7)
        torch.manual_seed(5)
        found.append(gradients(model, model(*token_rows())))
    assert_same(*found, tolerance=EXACT)


@pytest.mark.parametrize(
    "run",
    [
        lambda model: model(*token_rows(batch=BATCH + 1)),
        lambda model: model(*token_rows(batch=1)),
        lambda model: model(*(rows[:, :-1] for rows in token_rows())),
    ],
    ids=["more samples", "one sample", "shorter rows"],
)
def test_a_draw_for_another_batch_is_refused(run: Callable[[nn.Module], Tensor]) -> None:
    model = gpt()
    draw(attach(model, seed=1), 4)
    with pytest.raises(ValueError, match="call draw"):
        run(model)


@pytest.mark.parametrize("kept", [0, TOKENS + 1, {1: 4, 2: 0}])
def test_a_kept_length_out_of_range_is_refused(kept: int | dict[int, int]) -> None:
    with pytest.raises(ValueError, match="want kept lengths"):
        draw(attach(gpt(), seed=1), kept)
