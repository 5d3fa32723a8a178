"""Our ViT computes what timm's does, both ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from images import MODEL, file_of
from tiny import assert_same, experiment, gradients
from tokendrop.config.load import build
from tokendrop.config.model import VitConfig
from tokendrop.config.task import ImageClassification
from tokendrop.data.read.images import ImageReader
from tokendrop.data.tokenizer import label_vocabulary
from tokendrop.errors import UserError
from tokendrop.models.build import build_vit
from tokendrop.models.pretrained_vit import TimmWeights, as_timm, save_as_timm
from tokendrop.models.vit import Vit

EXACT = 1e-10


def config(**changes: Any) -> VitConfig:
    return build(VitConfig, {**MODEL, **changes}, "model")


def vit(**changes: Any) -> Vit:
    """With weights so large that every layer matters."""
    model = build_vit(config(**changes), seed=1).double()
    torch.manual_seed(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch(model: Vit) -> tuple[torch.Tensor, torch.Tensor]:
    size, classes = model.config.image_size, model.config.classes
    return torch.randn(5, 3, size, size, dtype=torch.float64), torch.randint(classes, (5,))


@pytest.mark.parametrize("recompute", [False, True])
def test_logits_loss_and_gradients_are_those_of_timm(recompute: bool) -> None:
    ours = vit()
    theirs = as_timm(vit())
    for block in ours.blocks:
        block.recompute = recompute
    pixels, labels = batch(ours)
    loss, logits = ours.train()(pixels, labels)
    expected = theirs.train()(pixels)
    torch.testing.assert_close(logits, expected, rtol=EXACT, atol=EXACT)
    their_loss = F.cross_entropy(expected, labels)
    torch.testing.assert_close(loss, their_loss, rtol=EXACT, atol=EXACT)
    assert_same(gradients(ours, loss), gradients(theirs, their_loss), tolerance=EXACT)


@pytest.mark.parametrize(
    ("preset", "name"), [("vit-b16", "vit_base_patch16_224"), ("vit-l16", "vit_large_patch16_224")]
)
def test_presets_have_the_parameters_of_timms_models(preset: str, name: str) -> None:
    with torch.device("meta"):
        ours = Vit(build(VitConfig, {"kind": "vit", "preset": preset, "classes": 1000}, "model"))
        theirs = timm.create_model(name)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}


def test_a_saved_model_is_read_by_timm_and_by_us(tmp_path: Path) -> None:
    ours = vit().float()
    save_as_timm(ours, tmp_path, labels=["a", "b", "c"], mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop=None)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert theirs.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    pixels = batch(ours)[0].float()
    torch.testing.assert_close(theirs(pixels), ours.logits(pixels))
    sizes = {key: value for key, value in MODEL.items() if key != "kind"}
    for place, known in ((tmp_path, sizes), (tmp_path / "model.safetensors", sizes.keys() - {"heads"})):
        found = TimmWeights(str(place))
        assert found.sizes == {"kind": "vit"} | {key: sizes[key] for key in known}
        names = dict(ours.named_parameters())
        assert_same(found.weights(names), {name: one.detach() for name, one in names.items()})


@pytest.mark.parametrize("crop", ["none", "padded", "resized"])
@pytest.mark.parametrize("pixels", [(40, 30), (30, 40), (32, 32)])
def test_timm_sees_held_out_images_as_we_do(tmp_path: Path, crop: Any, pixels: tuple[int, int]) -> None:
    """By the settings that the saved model has."""
    job = experiment(task={"kind": "image_classification", "crop": crop}, model={**MODEL, "image_size": 27})
    assert isinstance(job.task, ImageClassification)
    task = job.task.build(job)
    task.export(task.build_model(seed=1), label_vocabulary(["a", "b", "c"]), tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    transform = create_transform(**resolve_model_data_config(theirs))
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*pixels, 3), dtype=np.uint8))
    ours = ImageReader(size=27, crop=crop, augment="none", mean=job.task.mean, std=job.task.std, seed=1, threads=1)
    torch.testing.assert_close(transform(image), ours.held_out([file_of(image)])[0])


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no_such_model", "want a run, a checkpoint, or a ViT of timm"),
        ("folder", "want a run, a checkpoint, or a ViT of timm"),
        ("broken.safetensors", "want a run, a checkpoint, or a ViT of timm"),
        ("other.pth", "want the weights of a ViT, by timm's names"),
    ],
)
def test_what_is_no_vit_is_refused(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pth")
    path = place if place.startswith("no") else str(tmp_path / place)
    with pytest.raises(UserError, match=f"^model.init_from: .*{said}"):
        _ = TimmWeights(path).sizes


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("vit_small_patch14_dinov2", {"img_size": 28}),
        ("vit_base_patch16_224", {"init_values": 0.1}),
        ("vit_base_patch16_224", {"qk_norm": True}),
        ("vit_base_patch16_224", {"global_pool": "avg"}),
        ("vit_base_patch16_clip_quickgelu_224", {}),
        ("vit_base_patch16_224", {"reg_tokens": 2}),
        ("resnet18", {}),
    ],
)
def test_a_model_that_computes_something_else_is_refused(monkeypatch, kind: str, settings: dict[str, Any]) -> None:
    small = {} if kind == "resnet18" else {"embed_dim": 16, "depth": 1, "num_heads": 2, **settings}
    model = timm.create_model(kind, **small)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: model)  # nobody has its weights here
    with pytest.raises(UserError, match=r"^model\.init_from: "):
        _ = TimmWeights("some-name").sizes


def test_an_image_that_its_patches_do_not_cover_is_refused() -> None:
    with pytest.raises(UserError, match=r"^model: image_size=13 must be a multiple of patch_size=3"):
        config(image_size=13)
    assert config().sequence_length == 17
