"""Put token dropping on a model's layers, and take it off again."""

from collections.abc import Sequence

from torch import nn

from tokendrop.method.dropped_layer import DroppedLayer, dropped_class
from tokendrop.method.dropper import Dropping
from tokendrop.method.learned_router import LearnedRouter
from tokendrop.method.route import Route, check_apart, routes_along
from tokendrop.method.side_inputs import TokenDims

ROUTER = "router"
"""The name of a learned router in its model, with which those of its parameters begin."""


def attach(
    model: nn.Module,
    *,
    seed: int,
    routes: Sequence[Route] | None = None,
    full_length_layers: Sequence[int] = (0, -1),
    blocks: Sequence[nn.Module] | None = None,
    side_inputs: TokenDims | None = None,
    in_place: bool = False,
) -> Dropping:
    """Let the layers of a transformer drop tokens; parameter names and values stay as they are.

    A `LearnedRouter` among the routes becomes a part of the model, `router`; its parameters are added to the others.

    Tokens such as [CLS] are dropped like others unless `draw` is told `always=[0]`; of timm's models,
    `always=range(prefix)`, with timm's `num_prefix_tokens`; those with rotary positions want them to.

    What can't be told, and has to be right: that layers take (batch, tokens, width) where they are not torch's own and
    a batch has as many samples as tokens; that they make no positions or distances by themselves, counting from their
    first token; that `draw` got the ids of the samples that follow. Hooks on a dropped layer, and what a model
    records by them, such as hidden states, are of the kept tokens alone.

    Args:
        seed: of all draws.
        routes: the spans of layers that tokens may pass by; random-LTD's when left out, one for each layer that
            is not whole.
        full_length_layers: layers that go on seeing every token, numbered from 0, or from the end when negative.
        blocks: the layers in order; found by themselves when left out.
        side_inputs: for arguments of the layers that are not known here, the dimensions along which tokens lie.
        in_place: whether layers may write over what the dropped layer before them handed on, which spares a copy of
            (B, S, D) in each direction. Nothing but the next layer may read it then, nor its gradient: no skip
            connection between layers, no recorded hidden states, no hook on them or their gradients, no activation
            checkpoint around a layer.
    Returns:
        What to call `draw` on before each forward pass in training. Whoever forgets is warned once: where the model
        trains and nothing was drawn, or where it is called with other inputs or weights on the same draw. That is told
        by samples of them, when `model` itself is called and not compiled as a whole. Nothing is said of the same
        batch again with the same weights, of evaluation, or without gradients.
    Raises:
        ValueError: the layers can't be told, drop tokens already or take the sequence first, a number is out of
            range, or a learned router does not fit. While tokens drop, the model raises it for caches of keys and
            values, for router logits under a mask and for inputs of its layers that can't be cut to the kept tokens.
    """
    if any(isinstance(module, DroppedLayer) for module in (model.modules() if blocks is None else blocks)):
        raise ValueError("this model drops tokens already; detach(model) first")
    layers = list(repeated_layers(model) if blocks is None else blocks)
    check_layout(layers)
    if routes is None:
        routes = routes_along((layer, layer) for layer in dropped_layers(len(layers), full_length_layers))
    routes = [route.within(len(layers)) for route in routes]
    check_apart(routes)
    add_router(model, routes)
    dropping = Dropping(routes, seed=seed, side_inputs=side_inputs or {}, in_place=in_place)
    # Whole layers too: torch.compile tells classes apart, and would compile the full length once for each.
    for number, layer in enumerate(layers):
        layer.__class__ = dropped_class(type(layer))
        assert isinstance(layer, DroppedLayer)
        layer.follow(dropping, number)
    dropping.hook = model.register_forward_pre_hook(dropping.before_call, with_kwargs=True)
    return dropping


def detach(model: nn.Module) -> None:
    """Make every dropped layer of `model` a plain one again; a learned router goes with its parameters."""
    if isinstance(getattr(model, ROUTER, None), LearnedRouter):
        delattr(model, ROUTER)
    for module in model.modules():
        if isinstance(module, DroppedLayer):
            plain = module.plain_class
            module._dropping.hook.remove()
            del module._dropping, module._layer_number
            vars(module).pop("_compiled_route", None)
            module.__class__ = plain  # pyright: ignore[reportAttributeAccessIssue]


def add_router(model: nn.Module, routes: Sequence[Route]) -> None:
    """Make the learned router of some routes, if there is one, a part of the model, where its other parameters are.

    Raises:
        ValueError: there are several, the model has a part of that name, or a route is of several layers.
    """
    learned = {route.select: route for route in routes if isinstance(route.select, LearnedRouter)}
    if not learned:
        return
    if len(learned) > 1 or hasattr(model, ROUTER):
        raise ValueError(f"routes: want one learned router, and a model without a part of the name '{ROUTER}'")
    (router,) = learned
    if wide := [route for route in routes if route.select is router and route.first != route.last]:
        raise ValueError(
            f"routes: want a learned router on single layers, got the layers {wide[0].first} to {wide[0].last}"
        )
    like = next(model.parameters())
    model.add_module(ROUTER, router.to(like.device, like.dtype))


def dropping_of(model: nn.Module) -> Dropping:
    """The drops of a model that drops tokens: of a copy or of a loaded one, which has its own.

    Raises:
        ValueError: it drops none.
    """
    for module in model.modules():
        if isinstance(module, DroppedLayer):
            return module._dropping
    raise ValueError("no layer of this model drops tokens; attach(model, ...) first")


def dropped_layers(layers: int, full_length_layers: Sequence[int]) -> list[int]:
    """Numbers, from 0, of the layers that are not whole.

    Raises:
        ValueError: there is no layer of such a number.
    """
    if not all(-layers <= number < layers for number in full_length_layers):
        raise ValueError(f"full_length_layers: want numbers of {layers} layers, got {list(full_length_layers)}")
    whole = {number % layers for number in full_length_layers}
    return [number for number in range(layers) if number not in whole]


def check_layout(layers: Sequence[nn.Module]) -> None:
    """Raises ValueError for layers that take the sequence before the batch, as torch's do by default."""
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
                raise ValueError(f"{type(layer).__name__}.{name} takes (sequence, batch, width); want batch_first=True")


def repeated_layers(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The one list of equal layers that makes up a transformer: a ModuleList, or a Sequential where there is none.

    Raises:
        ValueError: there is none, or more than one.
    """
    outermost: dict[str, nn.ModuleList | nn.Sequential] = {}
    for kind in (nn.ModuleList, nn.Sequential):
        candidates = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, kind) and len(module) > 1 and len({type(layer) for layer in module}) == 1
        }
        outermost = outermost or {
            name: module
            for name, module in candidates.items()
            if not any(name.startswith(f"{other}.") for other in candidates)
        }
    if len(outermost) != 1:
        found = ", ".join(outermost) or "none"
        raise ValueError(f"want one list of equal layers in {type(model).__name__}, found {found}; pass blocks=...")
    return next(iter(outermost.values()))
