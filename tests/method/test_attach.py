"""Putting drops on a model and taking them off."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tiny import BATCH, TOKENS, assert_same, gpt, gradients, token_rows
from tokendrop.method import attach, detach
from tokendrop.models.gpt import Block

IDS = torch.arange(BATCH)


def describe(model: nn.Module) -> dict[str, object]:
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


WHOLE = st.lists(st.integers(-4, 3), max_size=3).map(tuple)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), whole=WHOLE)
def test_attach_keeps_every_parameter_name_and_value(seed: int, whole: tuple[int, ...]) -> None:
    plain, dropped = gpt(), gpt()
    attach(dropped, seed=seed, full_length_layers=whole)
    assert_same(dict(dropped.state_dict()), dict(plain.state_dict()))
    assert [name for name, _ in dropped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(block, Block) for block in dropped.blocks)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), whole=WHOLE, kept=st.integers(1, TOKENS), step=st.integers(0, 10**6))
def test_detach_leaves_the_model_as_it_was(seed: int, whole: tuple[int, ...], kept: int, step: int) -> None:
    model = gpt()
    before, values = describe(model), copy.deepcopy(model.state_dict())
    dropping = attach(model, seed=seed, full_length_layers=whole)
    dropping.draw(kept_length=kept, step=step, sample_ids=IDS, sequence_length=TOKENS)
    model(*token_rows()).backward()
    detach(model)
    assert describe(model) == before
    assert_same(dict(model.state_dict()), dict(values))
    rows, plain = token_rows(), gpt()
    assert_same(gradients(model, model(*rows)), gradients(plain, plain(*rows)))


@settings(max_examples=25, deadline=None)
@given(whole=WHOLE)
def test_a_checkpoint_of_a_dropped_model_loads_into_the_plain_one(whole: tuple[int, ...]) -> None:
    plain, dropped = gpt(), gpt()
    attach(dropped, seed=1, full_length_layers=whole)
    with torch.no_grad():
        for parameter in dropped.parameters():
            parameter.add_(1.0)
    plain.load_state_dict(dropped.state_dict(), strict=True)
    rows = token_rows()
    assert torch.equal(plain.eval()(*rows), dropped.eval()(*rows))


@pytest.mark.parametrize(
    ("full_length_layers", "dropped"),
    [((0, -1), (1, 2)), ((), (0, 1, 2, 3)), ((0,), (1, 2, 3)), ((-1,), (0, 1, 2)), ((1, -3), (0, 2, 3))],
)
def test_the_layers_left_whole_are_counted_from_both_ends(full_length_layers, dropped) -> None:
    model = gpt()
    assert attach(model, seed=1, full_length_layers=full_length_layers).layers == dropped
    detach(model)
    assert attach(model, seed=1, full_length_layers=full_length_layers).layers == dropped


@pytest.mark.parametrize("full_length_layers", [(4,), (-5,), (0, 99)])
def test_a_layer_that_is_not_there_is_refused(full_length_layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="want numbers of 4 layers"):
        attach(gpt(), seed=1, full_length_layers=full_length_layers)


def test_a_model_that_drops_already_is_refused() -> None:
    model = gpt()
    attach(model, seed=1)
    with pytest.raises(ValueError, match="detach"):
        attach(model, seed=1)


def two_towers() -> nn.Module:
    return nn.ModuleDict({tower: nn.ModuleList(nn.Linear(2, 2) for _ in range(3)) for tower in ("a", "b")})


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Linear(2, 2), "none"),
        (nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]), "none"),
        (two_towers(), "a, b"),
    ],
    ids=["no layers", "unequal layers", "two lists"],
)
def test_layers_that_cannot_be_told_are_refused(model: nn.Module, found: str) -> None:
    with pytest.raises(ValueError, match=f"found {found}; pass blocks="):
        attach(model, seed=1)


def test_layers_that_cannot_be_told_may_be_passed() -> None:
    model = two_towers()
    assert attach(model, seed=1, blocks=list(model["b"])).layers == (1,)
    assert type(model["a"][1]) is nn.Linear
    assert type(model["b"][1]) is not nn.Linear


def test_layers_within_layers_are_told_from_the_layers() -> None:
    model = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(5))
    assert attach(nn.Sequential(model), seed=1).layers == (1, 2, 3)


def test_two_models_of_one_class_drop_on_their_own() -> None:
    first, second = gpt(), gpt()
    one, two = attach(first, seed=1), attach(second, seed=1)
    one.draw(kept_length=4, step=0, sample_ids=IDS, sequence_length=TOKENS)
    assert two.kept(1) is None
    two.draw(kept_length=TOKENS, step=0, sample_ids=IDS, sequence_length=TOKENS)
    assert not torch.equal(first(*token_rows()), second(*token_rows()))
