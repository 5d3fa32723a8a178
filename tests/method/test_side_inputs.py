"""Masks, positions and token types follow the kept tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tokendrop.method import DrawContext, Uniform, attach
from tokendrop.method.side_inputs import KNOWN_SIDE_INPUTS, restrict, rope_of_kept, without_cache

S = 7


@st.composite
def kept_positions(draw: st.DrawFn) -> Tensor:
    """Kept positions (B, K) of sequences of S tokens, with as many samples as tokens among the cases."""
    batch = draw(st.sampled_from([1, 2, 3, S]))
    seed, kept = draw(st.integers(0, 10**6)), draw(st.integers(1, S - 1))
    context = DrawContext(seed=seed, step=0, sample_ids_B=torch.arange(batch), sequence_length=S)
    (kept_BK,) = Uniform().select(context, (0,), (kept,))
    return kept_BK


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def cut(name: str, value: object, kept_BK: Tensor, **more: tuple[int, ...]) -> object:
    return restrict(name, value, kept_BK, S, {**KNOWN_SIDE_INPUTS, **more})


@given(kept_positions(), st.sampled_from(["attention_mask", "position_ids", "token_type_ids"]), st.booleans())
def test_a_value_for_each_token_is_cut_to_the_kept_ones(kept_BK: Tensor, name: str, shared: bool) -> None:
    value_BS = numbered(1 if shared else len(kept_BK), S)
    result = cut(name, value_BS, kept_BK)
    expected = [[value_BS[0 if shared else b, s] for s in row] for b, row in enumerate(kept_BK.tolist())]
    assert torch.equal(result, torch.tensor(expected))


@given(kept_positions(), st.booleans(), st.sampled_from([1, 2]))
def test_a_mask_of_queries_and_keys_is_cut_along_both(kept_BK: Tensor, shared: bool, heads: int) -> None:
    mask_BHSS = numbered(1 if shared else len(kept_BK), heads, S, S)
    result = cut("attention_mask", mask_BHSS, kept_BK)
    for b, row in enumerate(kept_BK):
        assert torch.equal(result[b], mask_BHSS[0 if shared else b][:, row][:, :, row])


@given(kept_positions())
def test_a_mask_of_keys_alone_is_cut_along_the_keys(kept_BK: Tensor) -> None:
    mask_B11S = numbered(len(kept_BK), 1, 1, S)
    result = cut("attention_mask", mask_B11S, kept_BK)
    assert torch.equal(result, cut("attention_mask", mask_B11S[:, 0, 0], kept_BK)[:, None, None])


@given(kept_positions(), st.booleans(), st.sampled_from([4, S]))
def test_rotary_cosines_and_sines_are_cut_together(kept_BK: Tensor, shared: bool, width: int) -> None:
    pair = tuple(numbered(1 if shared else len(kept_BK), S, width) * sign for sign in (1, -1))
    result = cut("position_embeddings", pair, kept_BK)
    assert isinstance(result, tuple)
    for part, of_all in zip(result, pair, strict=True):
        expected = [of_all[0 if shared else b][row] for b, row in enumerate(kept_BK)]
        assert torch.equal(part, torch.stack(expected))


@given(kept_positions())
def test_what_does_not_span_the_sequence_passes_unchanged(kept_BK: Tensor) -> None:
    weights = numbered(len(kept_BK), 1, 3) if len(kept_BK) != S else numbered(1, 3)
    for value in (weights, None, True, 3.5, "text", (1, 2), object()):
        assert cut("layer_weights", value, kept_BK) is value
    assert cut("attention_mask", None, kept_BK) is None


def test_an_unknown_input_that_spans_the_sequence_is_refused_by_name_until_it_is_told() -> None:
    kept_BK = torch.tensor([[0, 3], [1, 2]])
    bias = numbered(2, 5, S)
    for value in (bias, (bias, None), [bias]):
        with pytest.raises(ValueError, match="'alibi' of shape"):
            cut("alibi", value, kept_BK)
    result = cut("alibi", bias, kept_BK, alibi=(2,))
    assert torch.equal(result, torch.stack([bias[0][:, [0, 3]], bias[1][:, [1, 2]]]))
    assert cut("alibi", bias, kept_BK, alibi=()) is bias


@pytest.mark.parametrize("value", [object(), "mask", {"full": numbered(2, S)}])
def test_a_mask_that_is_no_tensor_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="'attention_mask' is a"):
        cut("attention_mask", value, torch.tensor([[0, 3], [1, 2]]))


@pytest.mark.parametrize(
    ("name", "shape"), [("position_ids", (S,)), ("attention_mask", (S, S)), ("position_embeddings", (S, 4))]
)
def test_a_known_input_without_a_batch_dimension_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"'{name}' of shape .*dimension 0"):
        cut(name, numbered(*shape), torch.tensor([[0, 3], [1, 2]]))


@pytest.mark.parametrize("tokens", [S, S - 1])
def test_rotary_positions_of_all_sequences_at_once_are_refused_by_name(tokens: int) -> None:
    with pytest.raises(ValueError, match="'rope' holds positions of all sequences at once"):
        cut("rope", numbered(tokens, 8), torch.tensor([[0, 3], [1, 2]]))
    assert cut("rope", None, torch.tensor([[0, 3], [1, 2]])) is None


def test_rotary_positions_of_all_sequences_follow_the_kept_tokens_where_those_without_one_stay() -> None:
    kept_BK = torch.tensor([[0, 1, 4], [0, 1, 6]])
    for shape in ((S - 2, 4), (3, S - 2, 4), (1, 3, S - 2, 4), (2, 3, S - 2, 4)):
        rope = numbered(*shape)
        cut = rope_of_kept(rope, kept_BK, S, 2, stay=2)
        of_each = rope.expand(2, 3, S - 2, 4)
        assert torch.equal(cut.expand(2, 3, 1, 4), torch.stack([of_each[0, :, [2]], of_each[1, :, [4]]]))
    with pytest.raises(ValueError, match=r"no position for the first 2 tokens; want draw\(..., always=range\(2\)\)"):
        rope_of_kept(numbered(S - 2, 4), kept_BK, S, 2, stay=1)
    with pytest.raises(ValueError, match="want 5 positions"):
        rope_of_kept(numbered(S, 4), kept_BK, S, 2, stay=2)


@pytest.mark.parametrize(
    ("name", "shape"), [("position_ids", (2, S + 1)), ("attention_mask", (2, 1, 3, 3)), ("position_ids", (3, 2, S))]
)
def test_a_known_input_of_other_tokens_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    """Such as a distance of kept tokens alone that one layer hands to the next."""
    with pytest.raises(ValueError, match=f"side input '{name}' of shape .*: want"):
        cut(name, numbered(*shape), torch.tensor([[0, 3], [1, 2]]))


class Layered:
    """A cache of keys and values, as Hugging Face's, that some layers have filled."""

    def __init__(self, *filled: int) -> None:
        self.filled = filled

    def get_seq_length(self, layer: int) -> int:
        return S * (layer in self.filled)


def test_a_layer_that_drops_gets_no_cache_and_one_with_earlier_tokens_is_refused() -> None:
    sides = {"past_key_values": Layered(0), "use_cache": True, "scale": 2.0}
    assert without_cache(sides, 1) == {"past_key_values": None, "use_cache": False, "scale": 2.0}
    with pytest.raises(ValueError, match="past_key_values: keys and values of earlier tokens"):
        without_cache(sides, 0)
    with pytest.raises(ValueError, match="layer_past: keys and values"):
        without_cache({"layer_past": (numbered(2, S), numbered(2, S))}, 1)


class Reader(nn.Module):
    """A layer with side inputs of each kind, which it remembers."""

    def forward(self, hidden_states, attention_mask=None, *, token_type_ids=None, scale=None):
        self.read = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "scale": scale}
        return hidden_states, attention_mask


@pytest.mark.parametrize("positional", [True, False])
def test_a_layer_gets_its_side_inputs_cut_however_they_are_passed(positional: bool) -> None:
    layers = nn.ModuleList([Reader()])
    dropping = attach(layers, seed=1, full_length_layers=(), blocks=list(layers))
    dropping.draw(kept_length=3, step=0, sample_ids=torch.arange(2), sequence_length=S)
    hidden, mask, types = torch.randn(2, S, 4), numbered(2, S), numbered(2, S) + 100
    if positional:
        out = layers[0](hidden, mask, token_type_ids=types, scale=0.5)
    else:
        out = layers[0](hidden_states=hidden, attention_mask=mask, token_type_ids=types, scale=0.5)
    kept_BK = dropping.kept(0)
    assert torch.equal(layers[0].read["attention_mask"], mask.gather(1, kept_BK))
    assert torch.equal(layers[0].read["token_type_ids"], types.gather(1, kept_BK))
    assert layers[0].read["scale"] == 0.5
    assert torch.equal(out[0], hidden)
    assert out[1] is layers[0].read["attention_mask"]
