"""timm's vision transformers with the same function as our ViT, and the way back: parameters have the same names."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.models import VisionTransformer, load_state_dict, save_for_hf
from torch import Tensor, nn

from tokendrop.errors import UserError, first_line
from tokendrop.models.vit import Vit

_PARTS = "norm1|attn[.]qkv|attn[.]proj|norm2|mlp[.]fc1|mlp[.]fc2"
_OURS = re.compile(rf"cls_token|pos_embed|(patch_embed[.]proj|norm|head|blocks[.][0-9]+[.]({_PARTS}))[.](weight|bias)")
"""Names of parameters of ours; others would compute something that ours don't."""


class TimmWeights:
    """Weights of a vision transformer of timm under the names of ours, which are timm's."""

    tokenizer = None

    def __init__(self, place: str) -> None:
        """
        Args:
            place: a file of weights, a folder with a timm model, or a name that timm knows.
        Raises:
            UserError: there is no model, or none that ours can be.
        """
        self.place = place
        try:
            self._weights, self.heads = _read_file(place) if Path(place).is_file() else _read_model(place)
        except UserError:
            raise
        except Exception as error:  # of the network, of a file, or of the library
            raise UserError(
                f"model.init_from: {place}: want a run, a checkpoint, or a ViT of timm: a file of its weights,"
                f" a folder, or its name ({first_line(error)[:200]})"
            ) from None

    @property
    def sizes(self) -> dict[str, Any]:
        """Keys of `model` in a job, and their values there.

        Raises:
            UserError: the weights are not those of such a model.
        """
        try:
            width, _, patch, patch_width = self._weights["patch_embed.proj.weight"].shape
            patches = self._weights["pos_embed"].shape[1] - 1
            layers = 1 + max(int(name.split(".")[1]) for name in self._weights if name.startswith("blocks."))
            is_square = patch == patch_width and math.isqrt(patches) ** 2 == patches
        except (KeyError, ValueError, AttributeError, IndexError, TypeError):
            raise UserError(f"model.init_from: {self.place}: want the weights of a ViT, by timm's names") from None
        if others := [name for name in self._weights if not _OURS.fullmatch(name)]:
            raise UserError(f"model.init_from: {self.place} has {others[0]}, which no ViT here has")
        if not is_square:
            raise UserError(f"model.init_from: {self.place}: want square images and patches")
        found = {"kind": "vit", "layers": layers, "width": width, "patch_size": patch}
        found["image_size"] = math.isqrt(patches) * patch
        if self.heads is not None:
            found["heads"] = self.heads
        if "head.weight" in self._weights:
            found["classes"] = len(self._weights["head.weight"])
        return found

    def weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of our parameters that the model has, by name."""
        return {name: self._weights[name] for name in names if name in self._weights}


def as_timm(model: Vit) -> VisionTransformer:
    """The same function as a model of timm, sharing its weights."""
    config = model.config
    theirs: Any = timm.create_model(
        "vit_base_patch16_224",  # for what it leaves open; the sizes follow
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.layers,
        num_heads=config.heads,
        num_classes=config.classes,
    )
    theirs.load_state_dict(model.state_dict(), strict=True, assign=True)
    return theirs.eval()


def save_as_timm(
    model: Vit, to: Path, *, labels: Sequence[str], mean: Sequence[float], std: Sequence[float], crop: float | None
) -> None:
    """Write a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads.

    Args:
        labels: names of the classes, in their order.
        mean: of each channel, what images are normalized by; `std` alike.
        crop: the share of an image's shorter side that is seen, from its middle; None for the whole image, squashed.
    """
    ours = {"tag": "tokendrop", "license": None}  # not those of the weights that timm has
    settings, data = {"label_names": [*labels], "pretrained_cfg": ours}, {"mean": (*mean,), "std": (*std,)}
    data |= {"interpolation": "bilinear", "crop_pct": crop or 1.0, "crop_mode": "center" if crop else "squash"}
    save_for_hf(as_timm(model), str(to), model_config=settings, safe_serialization=True, data_config=data)


def _read_file(place: str) -> tuple[Mapping[str, Tensor], int | None]:
    return load_state_dict(place), None


def _read_model(place: str) -> tuple[Mapping[str, Tensor], int | None]:
    if other := _type_of_another_family(Path(place)):
        raise UserError(f"model.init_from: {place} is of the type {other}; want a ViT of timm")
    name = f"local-dir:{place}" if Path(place).is_dir() else f"hf-hub:{place}" if "/" in place else place
    model: Any = timm.create_model(name, pretrained=True)
    layers: Any = model.blocks if isinstance(model, VisionTransformer) else None
    if layers is None or not _computes_as_ours(model, layers[0]):
        raise UserError(
            f"model.init_from: {place}: want a ViT that reads its classes from [CLS], with GELU and LayerNorm, as"
            " ViT-B/16 of timm"
        )
    return model.state_dict(), layers[0].attn.num_heads


def _type_of_another_family(folder: Path) -> str | None:
    """The `model_type` of a folder of Hugging Face's; None of one of timm, which has an `architecture`."""
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # none, or none that can be read: timm says so
        return None
    is_theirs = isinstance(settings, dict) and "architecture" not in settings
    return settings.get("model_type") if is_theirs else None


def _computes_as_ours(model: Any, layer: Any) -> bool:
    """As far as parameters don't tell."""
    is_gelu = isinstance(layer.mlp.act, nn.GELU) and layer.mlp.act.approximate == "none"
    return is_gelu and (model.global_pool, layer.norm1.eps) == ("token", 1e-6)
