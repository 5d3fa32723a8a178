"""`tokendrop profile --from`: a device profile out of what `tokendrop bench device` wrote."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokendrop.config.files import read_text
from tokendrop.config.load import build
from tokendrop.errors import UserError
from tokendrop.schedule.device import DeviceProfile, ModelSpeed

_KIND = "result of tokendrop bench device"


def profile_from(file: Path, *, like: str, name: str) -> DeviceProfile:
    """The speeds of a result and its update, with all that it did not measure as another profile has it.

    A step on one worker takes what was measured, at each kept length that was.

    Args:
        like: a shipped profile or a file of one.
    Raises:
        UserError: the file is no result of `tokendrop bench device`, or holds no model; or there is no such profile.
    """
    try:
        result = json.loads(read_text(file, _KIND))
        models = [one for one in result["models"] if is_usual(one)] if result["bench"] == "device" else []
        if not models:
            raise UserError(f"{file}: want a {_KIND} that holds at least one model")
        update_s_per_parameter = min(_update_s(model) / model["parameters"] for model in models)
        speeds = tuple(_speed(model, update_s_per_parameter, str(file)) for model in models)
        here = result["machine"]
        how = f"{result['precision']}, {'compiled' if result['compiled'] else 'eager'}, torch {here['torch']}"
        other = build(DeviceProfile, like, "--like")
        source = (
            f"Speeds and update: {result['command']}, on {here['device']}, {how}. Links, storage, pauses, nodes and the"
            f" price were not measured by it; they are those of {like}: {other.source}"
        )
        return replace(
            other,
            name=name,
            kind="measured",
            source=source,
            speeds=speeds,
            update_s_per_parameter=update_s_per_parameter,
        )
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise UserError(f"{file}: want a {_KIND}, as --out of that writes it") from None


def is_usual(model: Mapping[str, Any]) -> bool:
    """Whether it was measured as jobs run by default: profiles, and so hours, tell nothing of fp8 or static graphs."""
    return model.get("fp8") is None and model.get("compile") != "static"


def _update_s(model: Mapping[str, Any]) -> float:
    """Of clip and AdamW; of a noisy measurement, no more than half of the shortest step."""
    return min(model["update_ms"]["median"], min(_steps_ms(model).values()) / 2) / 1e3


def _steps_ms(model: Mapping[str, Any]) -> dict[int, float]:
    return {length["kept_length"]: length["step_ms"]["median"] for length in model["lengths"].values()}


def _speed(model: Mapping[str, Any], update_s_per_parameter: float, where: str) -> ModelSpeed:
    """A model's forward and backward: its steps without the update, which a profile counts by parameters."""
    update_s = model["parameters"] * update_s_per_parameter
    points = [
        {"kept_length": kept, "micro_batch": model["micro_batch"], "seconds": step_ms / 1e3 - update_s}
        for kept, step_ms in _steps_ms(model).items()
    ]
    tree = {"model": model["preset"], "shape": model["shape"], "dropped_layers": model["dropped_layers"]}
    return build(ModelSpeed, tree | {"points": points}, where)
