"""Drops on models of other people: a dropped layer is the layer with dropped keys masked and dropped tokens passed by.

The oracle gathers nothing. It runs the plain model over all tokens, hands each dropped layer a mask that hides the
dropped keys, and puts the layer's input back in the dropped tokens' places.
"""

import copy
import inspect
import io
import pickle
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from other_models import BATCH, HUGGING_FACE, IMAGES, MODELS, TEXTS, inputs, layers, real_tokens, run
from tiny import assert_same, gradients
from tokendrop.method import Dropping, Route, attach, detach, dropping_of

KEPT = 5
IDS = torch.arange(BATCH) + 7
PADDED = [(name, padding) for name in TEXTS for padding in ("none", "right", "left")] + [(n, "none") for n in IMAGES]


def draw(dropping: Dropping, name: str, kept: int = KEPT, *, step: int = 1) -> None:
    other = MODELS[name]
    dropping.draw(kept_length=kept, step=step, sample_ids=IDS, sequence_length=other.tokens, always=range(other.prefix))


def drop(name: str, model: nn.Module, kept: int = KEPT, **more: object) -> Dropping:
    dropping = attach(model, seed=3, **more)
    draw(dropping, name, kept)
    return dropping


def visible(name: str, kept_BS: Tensor) -> Tensor:
    """bool (B, 1, S, S): what a query may see where only some keys are there."""
    other, places = MODELS[name], torch.arange(MODELS[name].tokens)
    distance_SS = places[:, None] - places
    allowed_SS = (distance_SS < other.window) & ((distance_SS >= 0) | (not other.causal))
    return kept_BS[:, None, None, :] & allowed_SS


def mask_dropped_keys(name: str, model: nn.Module, dropping: Dropping, real_BS: Tensor) -> None:
    """Make the plain `model` compute what it should with these drops, without dropping anything."""
    before: dict[int, Tensor] = {}
    for route in dropping.routes:
        kept_BK = dropping.kept(route.first)
        kept_BS = torch.zeros_like(real_BS).scatter(1, kept_BK, True)
        mask = torch.zeros(BATCH, 1, *[real_BS.shape[1]] * 2, dtype=next(model.parameters()).dtype)
        mask.masked_fill_(~visible(name, kept_BS & real_BS), torch.finfo(torch.float32).min)
        if name == "torch":
            mask = mask.expand(-1, 2, -1, -1).flatten(0, 1)  # (B * heads, S, S)

        def with_mask(layer, args, kwargs, mask=mask):
            names = list(inspect.signature(layer.forward).parameters)
            named = {**dict(zip(names, args, strict=False)), **kwargs, MODELS[name].mask: mask}
            if name == "torch":
                named["src_key_padding_mask"] = None
            return (named.pop(names[0]),), named

        def enter(_, args, route=route):
            before[route.first] = args[0]

        def pass_by(layer, args, kwargs, out, route=route, kept_BS=kept_BS):
            return torch.where(kept_BS[..., None], out, before[route.first])

        for number in range(route.first, route.last + 1):
            layers(model)[number].register_forward_pre_hook(with_mask, with_kwargs=True)
        layers(model)[route.first].register_forward_pre_hook(enter)
        layers(model)[route.last].register_forward_hook(pass_by, with_kwargs=True)


ROUTES = {"each layer": None, "a span": [Route(first=1, last=2)]}


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "padding"), PADDED)
def test_dropping_is_masking_and_passing_by(name: str, padding: str, attention: str, routes: str) -> None:
    dropped, oracle = MODELS[name].model(attention), MODELS[name].model(attention)
    batch = inputs(name, padding)
    mask_dropped_keys(name, oracle, drop(name, dropped, routes=ROUTES[routes]), real_tokens(name, batch))

    (loss, out), (expected, expected_out) = run(name, dropped, batch), run(name, oracle, batch)

    tolerance = MODELS[name].tolerance(attention)
    torch.testing.assert_close(out, expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    assert_same(gradients(dropped, loss), gradients(oracle, expected), tolerance=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_drops_change_the_loss_in_training_and_never_in_evaluation(name: str) -> None:
    plain, dropped, batch = MODELS[name].model(), MODELS[name].model(), inputs(name)
    drop(name, dropped)
    assert not torch.equal(run(name, dropped, batch)[0], run(name, plain, batch)[0])
    assert torch.equal(run(name, dropped.eval(), batch)[1], run(name, plain.eval(), batch)[1])


@pytest.mark.parametrize("name", MODELS)
def test_at_full_length_the_model_is_the_plain_one_bit_for_bit(name: str) -> None:
    plain, dropped, batch = MODELS[name].model(), MODELS[name].model(), inputs(name, "right")
    drop(name, dropped, kept=MODELS[name].tokens)
    (loss, _), (expected, _) = run(name, dropped, batch), run(name, plain, batch)
    assert torch.equal(loss, expected)
    assert_same(gradients(dropped, loss), gradients(plain, expected))


@pytest.mark.parametrize("name", MODELS)
def test_names_values_and_classes_are_those_of_the_plain_model(name: str) -> None:
    plain, model = MODELS[name].model(), MODELS[name].model()
    before = [(type(module), sorted(vars(module)), len(module._forward_pre_hooks)) for module in plain.modules()]
    drop(name, model)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    run(name, model, inputs(name))[0].backward()
    detach(model)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    after = [(type(module), sorted(vars(module)), len(module._forward_pre_hooks)) for module in model.modules()]
    assert after == before


def recompute(name: str, model: nn.Module, *, reentrant: bool) -> None:
    """Activation checkpoints, each model's own way: transformers' within its layers, timm's around them."""
    if name in IMAGES:
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # reentrant checkpoints want it


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize(("name", "reentrant"), [*product(HUGGING_FACE, [False, True]), *product(IMAGES, [False])])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, reentrant: bool, routes: str) -> None:
    batch, found, calls = inputs(name, "right"), [], []
    for recomputes in (False, True):
        model = MODELS[name].model()
        if recomputes:
            recompute(name, model, reentrant=reentrant)
        dropping = drop(name, model, routes=ROUTES[routes])
        part = next(layers(model)[1].children())
        part.register_forward_pre_hook(lambda *_, recomputes=recomputes: calls.append(recomputes))
        loss, _ = run(name, model, batch)
        if name in HUGGING_FACE:
            draw(dropping, name, 3, step=2)
        found.append(gradients(model, loss))
    assert_same(*found, tolerance=MODELS[name].tolerance("sdpa"))
    assert calls == [False, True, True]


def test_a_checkpoint_around_a_layer_that_would_be_computed_again_on_other_tokens_is_refused() -> None:
    model = MODELS["vit"].model()
    recompute("vit", model, reentrant=False)
    dropping = drop("vit", model)
    loss, _ = run("vit", model, inputs("vit"))
    draw(dropping, "vit", step=2)
    with pytest.raises(ValueError, match=r"computed it again on other tokens.*want draw\(\) after backward\(\)"):
        loss.backward()


@pytest.mark.parametrize("name", ["rope vit", "rope vit mixed", "eva02"])
def test_tokens_without_a_rotary_position_have_to_stay(name: str) -> None:
    model = MODELS[name].model()
    attach(model, seed=3).draw(kept_length=KEPT, step=1, sample_ids=IDS, sequence_length=MODELS[name].tokens)
    with pytest.raises(ValueError, match=r"no position for the first 1 tokens; want draw\(..., always=range\(1\)\)"):
        run(name, model, inputs(name))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_sample_of_almost_only_padding_trains_to_finite_numbers(name: str, attention: str) -> None:
    """Its one real token is dropped by most layers, so its padding attends to nothing at all."""
    model, batch = MODELS[name].model(attention).float(), inputs(name)
    drop(name, model, kept=2)
    batch["attention_mask"] = torch.ones(BATCH, MODELS[name].tokens, dtype=torch.long)
    batch["attention_mask"][1, 1:] = 0
    loss, _ = run(name, model, batch)
    assert torch.isfinite(loss)
    assert all(bool(torch.isfinite(grad).all()) for grad in gradients(model, loss).values())


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "torch", "vit", "eva02"])
def test_a_copy_drops_by_draws_of_its_own_and_comes_off_alone(name: str, copied: object) -> None:
    model, batch = MODELS[name].model(), inputs(name)
    dropping = drop(name, model)
    loss, _ = run(name, model, batch)
    other = copied(model)
    with pytest.warns(UserWarning, match=r"draw\(\) was never called"):
        assert torch.equal(run(name, other, batch)[0], run(name, MODELS[name].model(), batch)[0])
    draw(dropping_of(other), name, 7)
    assert dropping.kept(1).shape == (BATCH, KEPT)
    assert not torch.equal(run(name, other, batch)[0], loss)
    draw(dropping_of(other), name)
    assert torch.equal(run(name, other, batch)[0], loss)
    detach(other)
    assert torch.equal(run(name, other, batch)[0], run(name, MODELS[name].model(), batch)[0])
    assert torch.equal(run(name, model, batch)[0], loss)
