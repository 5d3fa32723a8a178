"""Whole sequences that pass layers by: against a dense model, at any split, with empty batches."""

from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tiny import TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.method import Dropping, Route, Uniform, WholeSequences, attach
from tokendrop.method.draw import draw_places
from tokendrop.method.whole_sequences import KeptSequences
from tokendrop.models.gpt import Gpt, rotary_angles
from tokendrop.train.device import compile_layers

EXACT = 1e-12
BATCH, LAYERS = 5, 4


def routes(*layers: int, rescales: bool = True) -> list[Route]:
    return [Route(first=layer, last=layer, select=WholeSequences(rescales=rescales)) for layer in layers]


def draw(dropping: Dropping, kept: int | dict[int, int], *, step: int = 3, batch: int = BATCH, **more: Any) -> None:
    """By default the micro batch is the whole global batch."""
    where = {"places": range(batch), "global_batch": batch} | more
    ids = torch.arange(batch) + 70
    dropping.draw(kept_length=kept, step=step, sample_ids=ids, sequence_length=TOKENS, **where)


def dense_loss(plain: Gpt, dropping: Dropping, rows: tuple[Tensor, Tensor], scale: dict[int, float]) -> Tensor:
    """All sequences run through all layers, and what a layer adds is masked and scaled."""
    ids_BS, labels_BS = rows
    x_BSD, rotary = plain.tokens(ids_BS), None
    if plain.positions is None:
        rotary = rotary_angles(TOKENS, plain.config.width // plain.config.heads, x_BSD)
    else:
        x_BSD = x_BSD + plain.positions.weight[:TOKENS]
    for number, block in enumerate(plain.blocks):
        kept, out_BSD = dropping.kept(number), block(x_BSD, rotary)
        if kept is None:
            x_BSD = out_BSD
            continue
        runs_B11 = torch.zeros(len(ids_BS), 1, 1, dtype=torch.bool)
        runs_B11[kept.rows_R] = True
        x_BSD = x_BSD + torch.where(runs_B11, (out_BSD - x_BSD) * scale[number], 0.0)
    logits = plain.norm(x_BSD) @ plain.tokens.weight.T
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())


@given(kept=st.lists(st.integers(0, BATCH), min_size=3, max_size=3), step=st.integers(0, 10**6), rescales=st.booleans())
@settings(max_examples=6)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_layers_are_dense_ones_whose_additions_to_dropped_sequences_are_masked(
    positions: str, recompute: bool, kept: list[int], step: int, rescales: bool
) -> None:
    dropped = gpt(positions=positions, layers=LAYERS, recompute=recompute)
    plain = gpt(positions=positions, layers=LAYERS)
    dropping = attach(dropped, seed=1, routes=routes(0, 2, 3, rescales=rescales))
    some = dict(zip((0, 2, 3), kept, strict=True))
    draw(dropping, some, step=step)
    scale = {layer: BATCH / count if count and rescales else 1.0 for layer, count in some.items()}
    rows = token_rows(BATCH)
    loss, expected = dropped(*rows), dense_loss(plain, dropping, rows, scale)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert_same(gradients(dropped, loss), gradients(plain, expected), tolerance=EXACT)


def test_a_layer_that_is_computed_again_on_other_sequences_is_told() -> None:
    model = gpt(layers=LAYERS)
    dropping = attach(model, seed=1, routes=routes(1))

    def run(step: int) -> Tensor:
        draw(dropping, 2, step=step)
        x_BSD = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64, requires_grad=True)
        return checkpoint(model.blocks[1], x_BSD, use_reentrant=False).square().mean()

    run(3).backward()
    first = run(3)
    assert not torch.equal(dropping.kept(1).rows_R, (run(4), dropping.kept(1).rows_R)[1])
    with pytest.raises(ValueError, match=r"computed it again on other tokens"):
        first.backward()


@given(kept=st.integers(0, BATCH - 1), step=st.integers(0, 10**6))
@settings(max_examples=10)
def test_what_is_dropped_leaves_a_layer_as_it_came(kept: int, step: int) -> None:
    model = gpt(layers=LAYERS)
    dropping = attach(model, seed=1, routes=routes(1))
    draw(dropping, kept, step=step)
    x_BSD = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64)
    out_BSD = model.blocks[1](x_BSD)
    same = [torch.equal(before, after) for before, after in zip(x_BSD, out_BSD, strict=True)]
    assert same.count(False) == kept
    assert [row for row, is_same in enumerate(same) if not is_same] == dropping.kept(1).rows_R.tolist()


@pytest.mark.parametrize("by_hand", [False, True])
def test_where_every_sequence_stays_it_is_the_plain_model_bit_for_bit(by_hand: bool) -> None:
    dropped, plain = (gpt(layers=LAYERS, dtype=torch.float32) for _ in range(2))
    dropping = attach(dropped, seed=1, routes=routes(0, 1, 2, 3))
    draw(dropping, BATCH)
    assert [dropping.kept(layer) for layer in range(LAYERS)] == [None] * LAYERS
    if by_hand:  # `draw` itself leaves gather and combine out
        everything = KeptSequences(rows_R=torch.arange(BATCH), batch=BATCH, scale=1.0)
        dropping._kept = dict.fromkeys(range(LAYERS), everything)
    rows = token_rows(BATCH)
    loss, expected = dropped(*rows), plain(*rows)
    assert torch.equal(loss, expected)
    assert_same(gradients(dropped, loss), gradients(plain, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layer_that_no_sequence_runs_through_has_gradients_of_zeros(dtype: torch.dtype) -> None:
    model = gpt(layers=LAYERS, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    dropping = attach(model, seed=1, routes=routes(1, 2))
    draw(dropping, {1: 0, 2: 3})
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        loss = model(*token_rows(BATCH))
    found = gradients(model, loss)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, grad in found.items():
        assert bool(grad.any()) != name.startswith("blocks.1."), name


@given(
    kept=st.lists(st.integers(0, 24), min_size=2, max_size=2),
    step=st.integers(0, 10**6),
    micro=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
)
def test_the_same_sequences_run_at_any_split_and_just_so_many(kept: list[int], step: int, micro: int) -> None:
    whole, split = (attach(gpt(), seed=1, routes=routes(1, 2)) for _ in range(2))
    some = dict(zip((1, 2), kept, strict=True))
    draw(whole, some, step=step, batch=24)
    found: dict[int, list[int]] = {1: [], 2: []}
    for first in range(0, 24, micro):
        draw(split, some, step=step, batch=micro, places=range(first, first + micro), global_batch=24)
        for layer, runs in found.items():
            rows = split.kept(layer)
            runs += range(first, first + micro) if rows is None else [first + row for row in rows.rows_R.tolist()]
    for layer, runs in found.items():
        rows = whole.kept(layer)
        assert runs == (list(range(24)) if rows is None else rows.rows_R.tolist())
        assert len(runs) == some[layer]


def test_every_sequence_is_as_likely_to_stay_and_layers_and_steps_draw_apart() -> None:
    times = 2000
    runs = torch.stack(
        [draw_places(seed=5, step=step, layers=(1, 2), kept=(3, 3), global_batch=12) for step in range(times)]
    ).double()
    often = runs.mean(0)
    assert (often - 3 / 12).abs().max() < 5 * (0.25 * 0.75 / times) ** 0.5
    together = (runs[:, 0] * runs[:, 1]).mean()
    after = (runs[1:, 0] * runs[:-1, 0]).mean()
    for share in (together, after):
        assert float(share) == pytest.approx(1 / 16, abs=0.01)


def test_side_inputs_go_with_their_sequences_and_unknown_ones_are_refused() -> None:
    class Layer(nn.Module):
        def forward(self, x_BSD: Tensor, bias: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, str]:
            return x_BSD + bias + (0 if attention_mask is None else attention_mask[..., None]), "more"

    x_BSD, mask = torch.randn(BATCH, TOKENS, 8), torch.randn(BATCH, TOKENS)
    for bias, known in ((torch.randn(1, TOKENS, 8), {}), (torch.randn(BATCH, 1, 8), {"bias": ()})):
        layers = nn.ModuleList([Layer(), Layer()])
        dropping = attach(layers, seed=1, routes=routes(1, rescales=False), side_inputs=known, blocks=layers)
        draw(dropping, 2)
        out_BSD, more = layers[1](x_BSD, bias, attention_mask=mask)
        runs = dropping.kept(1).rows_R
        expected = x_BSD.clone()
        expected[runs] = (x_BSD + bias + mask[..., None])[runs]
        assert torch.equal(out_BSD, expected)
        assert more == "more"
    layers = nn.ModuleList([Layer(), Layer()])
    draw(attach(layers, seed=1, routes=routes(1), blocks=layers), 2)
    with pytest.raises(ValueError, match=r"side input 'bias' of shape \(5, 8\) may be one of each of the 5 sequences"):
        layers[1](x_BSD, torch.randn(BATCH, 8))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"places": None}, "routes of whole sequences want places"),
        ({"global_batch": None}, "want places, those of each sample, and global_batch"),
        ({"always": [0]}, "want no `always`"),
        ({"kept": 6}, r"want 0\.\.5 sequences that stay, got \[6\]"),
    ],
)
def test_a_draw_that_lacks_something_says_what(more: dict[str, Any], said: str) -> None:
    dropping = attach(gpt(), seed=1, routes=routes(1))
    with pytest.raises(ValueError, match=said):
        draw(dropping, more.pop("kept", 2), **more)


def test_a_batch_of_another_size_than_was_drawn_for_is_refused() -> None:
    model = gpt()
    draw(attach(model, seed=1, routes=routes(1)), 2)
    with pytest.raises(ValueError, match=r"of a micro batch of 5, a layer got 3; call draw\(\)"):
        model(*token_rows(3))


def test_beside_layers_that_drop_tokens() -> None:
    model = gpt(layers=LAYERS)
    dropping = attach(model, seed=1, routes=[*routes(1), Route(first=2, last=2, select=Uniform())])
    draw(dropping, {1: 2, 2: 7})
    seen: dict[int, tuple[int, ...]] = {}
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: tuple(args[0].shape[:2])}))
    model(*token_rows(BATCH))
    assert seen == {0: (5, TOKENS), 1: (2, TOKENS), 2: (5, 7), 3: (5, TOKENS)}


def test_compiled_layers_take_any_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for many, and one each for none and for a single one, which dynamo tells apart."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **more: compile_(*args, backend=backend, **more))
    torch._dynamo.reset()
    eager, compiled = gpt(), gpt()
    compile_layers(compiled.blocks)
    both = [(model, attach(model, seed=1, routes=routes(1, 2))) for model in (eager, compiled)]
    for step, kept in enumerate([5, 3, 4, 0, 1, 2, 5, 3, 0]):
        found = []
        for model, dropping in both:
            draw(dropping, kept, step=step)
            found.append(gradients(model, model(*token_rows(BATCH))))
        assert_same(*found, tolerance=EXACT)
    torch._dynamo.reset()
    assert graphs <= 4
