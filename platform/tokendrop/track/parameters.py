"""What MLflow shows as a run's parameters: what its job gives, and a dozen keys that always matter."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.schedule.duration import Duration

ALWAYS = (
    *("model.kind", "model.preset", "model.layers", "model.width", "model.sequence_length"),
    *("drop.method", "drop.schedule.kind", "drop.schedule.start", "drop.schedule.until"),
    *("train.length", "train.global_batch", "train.micro_batch", "train.peak_lr", "train.lr_clock"),
    *("seed", "scaling.mode", "scaling.workers"),
)
"""Shown with their defaults too, where the job has such a key."""
_VARIANT = ("kind", "method")  # keys that say which class a branch is


def parameters(config: ExperimentConfig) -> dict[str, str]:
    """The keys of a job that differ from their defaults, and those that matter `ALWAYS`; in the job's order.

    A branch that is another variant than the default one differs in its `kind` or `method`, and in the keys that differ
    from the defaults of that variant.
    """
    shown = {*ALWAYS, *_changed(config, None, "")}
    return {key: value for key, value in flat(asdict(config), text=listed).items() if key in shown}


def _changed(branch: Any, usual: Any, prefix: str) -> Iterator[str]:
    """Dotted keys of a branch with other values than the default ones.

    Args:
        usual: the branch as it would be by default; None where it has none.
    """
    for field in fields(branch):
        value, key = getattr(branch, field.name), f"{prefix}{field.name}"
        default = _default(field)
        if isinstance(usual, type(branch)) or (usual is not None and field.name in _VARIANT):
            default = getattr(usual, field.name, MISSING)
        if is_dataclass(value) and not isinstance(value, Duration):
            yield from _changed(value, default if is_dataclass(default) else None, f"{key}.")
        elif value != default or (usual is None and field.name in _VARIANT):
            yield from flat({key: value})


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def listed(value: Any) -> str:
    """A value for people: without the brackets of a list."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def flat(tree: Mapping[str, Any], prefix: str = "", *, text: Callable[[Any], str] = str) -> dict[str, str]:
    """A tree of settings with dotted keys and values as text, as MLflow's parameters want them."""
    result: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Duration):
            value = asdict(value)
        if isinstance(value, Mapping) and set(value) != {"amount", "unit"}:
            result |= flat(value, f"{prefix}{key}.", text=text)
        elif isinstance(value, Mapping):
            result[f"{prefix}{key}"] = f"{float(value['amount']):g} {value['unit']}"
        else:
            result[f"{prefix}{key}"] = text(value)
    return result
