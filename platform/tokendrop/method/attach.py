"""Put token dropping on a model's layers, and take it off again."""

from collections.abc import Sequence

from torch import nn

from tokendrop.method.dropper import DroppedLayer, Dropping, dropped_class
from tokendrop.method.side_inputs import TokenDims


def attach(
    model: nn.Module,
    *,
    seed: int,
    whole_layers: Sequence[int] = (0, -1),
    blocks: Sequence[nn.Module] | None = None,
    side_inputs: TokenDims | None = None,
) -> Dropping:
    """Let the layers of a transformer drop tokens; parameter names and values stay as they are.

    Args:
        seed: of all draws.
        whole_layers: layers that go on seeing every token, numbered from 0, or from the end when negative.
        blocks: the layers in order; found by themselves when left out.
        side_inputs: for arguments of the layers that are not known here, the dimensions along which tokens lie.
    Returns:
        What to call `draw` on before each forward pass.
    Raises:
        ValueError: the layers can't be told, drop tokens already, or a number is out of range.
    """
    if any(isinstance(module, DroppedLayer) for module in (model.modules() if blocks is None else blocks)):
        raise ValueError("this model drops tokens already; detach(model) first")
    layers = list(repeated_layers(model) if blocks is None else blocks)
    if not all(-len(layers) <= number < len(layers) for number in whole_layers):
        raise ValueError(f"whole_layers: want numbers of {len(layers)} layers, got {list(whole_layers)}")
    whole = {number % len(layers) for number in whole_layers}
    dropped = [number for number in range(len(layers)) if number not in whole]
    dropping = Dropping(dropped, seed=seed, side_inputs=side_inputs or {})
    # Whole layers too: torch.compile tells classes apart, and would compile the full length once for each.
    for number, layer in enumerate(layers):
        layer.__class__ = dropped_class(type(layer))
        assert isinstance(layer, DroppedLayer)
        layer.follow(dropping, number)
    return dropping


def detach(model: nn.Module) -> None:
    """Make every dropped layer of `model` a plain one again."""
    for module in model.modules():
        if isinstance(module, DroppedLayer):
            plain = module.plain_class
            del module._dropping, module._layer_number
            module.__class__ = plain  # pyright: ignore[reportAttributeAccessIssue]


def repeated_layers(model: nn.Module) -> nn.ModuleList:
    """The one list of equal layers that makes up a transformer.

    Raises:
        ValueError: there is none, or more than one.
    """
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(layer) for layer in module}) == 1
    }
    outermost = {
        name: module
        for name, module in candidates.items()
        if not any(name.startswith(f"{other}.") for other in candidates)
    }
    if len(outermost) != 1:
        found = ", ".join(outermost) or "none"
        raise ValueError(f"want one list of equal layers in {type(model).__name__}, found {found}; pass blocks=...")
    return next(iter(outermost.values()))
