"""Files of images into what a model reads; each is cut and changed at random as its address says."""

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchvision.transforms import v2

from tokendrop.data.read.order import hashed

# Dimensions: B images, C channels, Y and X pixels.

_RANDOM = {torch.rand, torch.randint, torch.randperm, torch.randn, torch.Tensor.uniform_, torch.Tensor.random_}
MIDDLE = 224 / 256
"""Of a held-out image that is cut to its middle: its side, over the shorter side before; cut off as timm does."""


class Draws(TorchFunctionMode):
    """While its block runs, what this thread draws comes from a generator of its own, not from the process's.

    torchvision's transforms take no generator. That of the process belongs to the trainer's dropout.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RANDOM:
            return func(*args, **{**(kwargs or {}), "generator": self._generator})
        return func(*args, **(kwargs or {}))


class ImageReader:
    """Decodes images, brings them to a model's size, and normalizes them."""

    def __init__(
        self,
        *,
        size: int,
        crop: Literal["none", "padded", "resized"],
        augment: Literal["none", "rand_augment"],
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        threads: int = 1,
    ) -> None:
        """
        Args:
            size: height and width of what a model reads, pixels.
            crop: keys of the task `image_classification`; `augment`, `mean` and `std` alike.
            threads: that decode and change images.
        """
        self.size, self.crop, self.augment, self.seed = size, crop, augment, seed
        self._mean_C11, self._std_C11 = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
        self._whole, self._random = v2.Resize([size, size]), v2.RandAugment()
        self._part, self._mirror = v2.RandomResizedCrop([size, size]), v2.RandomHorizontalFlip()
        self._middle = v2.Compose([v2.Resize(int(size / MIDDLE)), v2.CenterCrop(size)])
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def training(self, contents: Sequence[bytes], ids_B: NDArray[np.int64]) -> Tensor:
        """Images (B, 3, size, size), float32, of the samples with these ids."""
        seeds_B = hashed(self.seed, ids_B)

        def changed(content: bytes, seed: np.uint64) -> Image.Image:
            with Draws(int(seed)):
                return self._changed(decoded(content))

        return self._normalized(self._map(changed, contents, seeds_B))

    def held_out(self, contents: Sequence[bytes]) -> Tensor:
        """Images (B, 3, size, size), float32, as they are."""
        fit = self._middle if self.crop == "resized" else self._whole
        return self._normalized(self._map(lambda content: fit(decoded(content)), contents))

    def _map(self, function: Callable[..., Image.Image], *values: Any) -> list[Image.Image]:
        return [*(self._pool.map if self._pool else map)(function, *values)]

    def _changed(self, image: Image.Image) -> Image.Image:
        if self.crop == "padded":
            image = self._mirror(_padded_crop(*image.size)(image))
        elif self.crop == "resized":
            image = self._mirror(self._part(image))
        if self.augment == "rand_augment":
            image = self._random(image)
        return image if image.size == (self.size, self.size) else self._whole(image)

    def _normalized(self, images: list[Image.Image]) -> Tensor:
        pixels_BYXC = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        pixels_BCYX = pixels_BYXC.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return pixels_BCYX.div_(255).sub_(self._mean_C11).div_(self._std_C11)


def decoded(content: bytes) -> Image.Image:
    """An image in RGB; one without colours has the same in all channels, of 16 bits the upper eight."""
    with Image.open(io.BytesIO(content)) as image:
        if image.mode.startswith("I"):  # which else is cut off at 255
            return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert(
                "RGB"
            )
        return image.convert("RGB")


@cache
def _padded_crop(width: int, height: int) -> v2.RandomCrop:
    return v2.RandomCrop((height, width), padding=[max(1, width // 8), max(1, height // 8)])
