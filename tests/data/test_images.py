"""What a model reads of an image is a function of its file, the seed and its sample id."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from images import PIXELS, file_of, image_of
from tokendrop.data.read.images import ImageReader, decoded

FILES = [file_of(image_of(number)) for number in range(12)]
HALF = (0.5, 0.5, 0.5)


def reader(*, crop: str = "padded", augment: str = "rand_augment", size: int = PIXELS, seed: int = 1, threads: int = 1):
    return ImageReader(size=size, crop=crop, augment=augment, mean=HALF, std=HALF, seed=seed, threads=threads)


@settings(max_examples=15)
@given(
    ids=st.lists(st.integers(0, 2**50), min_size=2, max_size=8, unique=True),
    crop=st.sampled_from(["none", "padded", "resized"]),
    augment=st.sampled_from(["none", "rand_augment"]),
    data=st.data(),
)
def test_an_image_is_the_same_whatever_the_batch_the_threads_and_the_process_draws(ids, crop, augment, data):
    files = [FILES[one % len(FILES)] for one in ids]
    alone = [
        reader(crop=crop, augment=augment).training([file], np.array([one]))
        for file, one in zip(files, ids, strict=True)
    ]
    order = data.draw(st.permutations(range(len(ids))))
    torch.manual_seed(data.draw(st.integers(0, 100)))
    before = torch.get_rng_state()
    together = reader(crop=crop, augment=augment, threads=3).training(
        [files[place] for place in order], np.array([ids[place] for place in order])
    )
    assert torch.equal(torch.get_rng_state(), before)  # all draws are addressed
    assert torch.equal(together, torch.cat([alone[place] for place in order]))


@pytest.mark.parametrize(("crop", "augment"), [("padded", "none"), ("resized", "none"), ("none", "rand_augment")])
def test_other_samples_and_other_seeds_change_an_image_in_other_ways(crop, augment):
    ids = np.arange(40)
    images = reader(crop=crop, augment=augment).training([FILES[0]] * 40, ids)
    assert len(images.unique(dim=0)) > 8
    assert not torch.equal(reader(crop=crop, augment=augment, seed=2).training([FILES[0]] * 40, ids), images)


def test_padded_crops_move_an_image_by_an_eighth_at_most_and_mirror_half_of_them():
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    image[:, 8, 5] = 255
    file = file_of(Image.fromarray(image.permute(1, 2, 0).numpy()))
    found = reader(crop="padded", augment="none", size=16).training([file] * 400, np.arange(400))
    places = {tuple(one.nonzero()[0, 1:].tolist()) for one in (found > 0)}
    assert places == {(y, x) for y in range(6, 11) for x in [*range(3, 8), *range(8, 13)]}


@pytest.mark.parametrize("crop", ["none", "resized"])
def test_a_held_out_image_is_torchvisions(crop):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))
    fit = [v2.Resize(int(32 / 0.875)), v2.CenterCrop(32)] if crop == "resized" else [v2.Resize([32, 32])]
    normalize = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(HALF, HALF)]
    expected = v2.Compose([*fit, *normalize])(image)
    found = reader(crop=crop, augment="none", size=32).held_out([file_of(image)])
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "LA", "I;16"])
def test_images_of_any_mode_have_three_channels(mode):
    plain = Image.new("L", (5, 7), 200)
    file = io.BytesIO()
    plain.convert(mode).save(file, "tiff") if mode != "I;16" else plain.convert("I;16").save(file, "png")
    image = decoded(file.getvalue())
    assert (image.mode, image.size) == ("RGB", (5, 7))


def test_a_grey_image_of_16_bits_keeps_its_shades():
    ramp = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    pixels = np.asarray(decoded(file_of(Image.fromarray(ramp))))
    assert (pixels[..., 0].ravel() == np.arange(256)[: pixels[..., 0].size]).all()


def test_a_grey_image_has_the_same_in_all_channels():
    pixels = np.asarray(decoded(file_of(image_of(1).convert("L"))))
    assert (pixels == pixels[..., :1]).all()
