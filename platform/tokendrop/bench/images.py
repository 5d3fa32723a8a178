"""`tokendrop bench images`: images read for training, on one core, beside torchvision's own transforms."""

import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from tokendrop.bench.figures import bench_result, figure, interleave, ratios
from tokendrop.data.read.images import ImageReader
from tokendrop.data.read.prefetch import Prefetcher

_HALF = (0.5, 0.5, 0.5)
_CONSUMER = 2000  # images a second
_BATCH = 64


def bench_images(*, rounds: int, images: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Decode, cut and mirror JPEG files at random, and normalize them: small ones, and larger ones as ImageNet's.

    Args:
        images: of the small ones, in one turn; of the larger ones, a sixteenth.
    """
    torch.set_num_threads(1)
    sets = {
        "32": (_files(32, 32, images), "padded", v2.RandomCrop(32, padding=4), 32),
        "224": (_files(500, 400, max(1, images // 16)), "resized", v2.RandomResizedCrop([224, 224]), 224),
    }
    cases: dict[str, Callable[[], float]] = {}
    for name, (files, crop, cut, size) in sets.items():
        reader: Any = ImageReader(size=size, crop=crop, augment="none", mean=_HALF, std=_HALF, seed=1)  # pyright: ignore[reportArgumentType]
        cases[name] = partial(_rate, partial(reader.training, files, np.arange(len(files))), len(files))
        cases[f"torchvision_{name}"] = partial(_rate, partial(_plain, files, cut), len(files))
    small = sets["32"][0]
    cases["wait_fraction"] = partial(_wait_fraction, small)
    for warm_up in cases.values():
        warm_up()
    found = interleave(cases, rounds=rounds, log=log)
    figures: dict[str, Any] = {}
    for name in sets:
        figures[f"images_per_s_{name}"] = figure(found[name], "images/s a core")
        figures[f"over_torchvision_{name}"] = figure(ratios(found[name], found[f"torchvision_{name}"]), "x")
    figures["wait_fraction"] = figure(found["wait_fraction"], f"of the time of {_CONSUMER} images/s")
    return bench_result("images", figures, f"tokendrop bench images --rounds {rounds} --images {images}")


def _files(width: int, height: int, count: int) -> list[bytes]:
    """JPEG files of smooth random images: a photograph's compress as well."""
    chance = np.random.default_rng(0)
    files: list[bytes] = []
    for _ in range(count):
        small = Image.fromarray(chance.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8))
        file = io.BytesIO()
        small.resize((width, height), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
        files.append(file.getvalue())
    return files


def _plain(files: list[bytes], cut: v2.Transform) -> Tensor:
    """As training scripts with torchvision do it."""
    change = v2.Compose([cut, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    normalize = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(_HALF, _HALF)])
    return torch.stack([normalize(change(Image.open(io.BytesIO(file)).convert("RGB"))) for file in files])


def _rate(read: Callable[[], Tensor], images: int) -> float:
    started = time.process_time()  # of this thread's core alone, whatever else the machine does
    read()
    return images / (time.process_time() - started)


def _wait_fraction(files: list[bytes]) -> float:
    """Share of its time that a consumer waits for batches that are read while it is at work, on a core of its own."""
    reader = ImageReader(size=32, crop="padded", augment="none", mean=_HALF, std=_HALF, seed=1)

    def read(number: int) -> Tensor:
        ids = np.arange(number * _BATCH, (number + 1) * _BATCH)
        return reader.training([files[one % len(files)] for one in ids], ids)

    ahead = Prefetcher(read)
    ahead.get(0, then=1)
    time.sleep(_BATCH / _CONSUMER)  # the first step, which had nothing read ahead
    waited, started = 0.0, time.perf_counter()
    for number in range(1, 1 + max(4, len(files) // _BATCH)):
        asked = time.perf_counter()
        ahead.get(number, then=number + 1)
        waited += time.perf_counter() - asked
        time.sleep(_BATCH / _CONSUMER)  # a device computes
    return waited / (time.perf_counter() - started)
