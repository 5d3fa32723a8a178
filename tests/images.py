"""Small images whose colour tells their class, and folders of their rows without Ray."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from pairs import write_shards
from tokendrop.data.prepare.pack import Documents, Packer
from tokendrop.data.read.image_rows import IMAGE_ROW, image_row
from tokendrop.data.shards.format import TOKENIZER
from tokendrop.data.tokenizer import label_vocabulary

CLASSES, PIXELS = ("red", "green", "blue"), 12
TASK = {"kind": "image_classification", "crop": "padded", "augment": "rand_augment"}
MODEL = {"kind": "vit", "layers": 4, "width": 16, "heads": 2, "image_size": PIXELS, "patch_size": 3, "classes": 3}


def image_of(number: int) -> Image.Image:
    """A noisy image of class `number % 3`."""
    chance = np.random.default_rng(number)
    pixels = chance.integers(0, 100, (PIXELS, PIXELS, 3), dtype=np.uint8)
    pixels[..., number % 3] += 150
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "png") -> bytes:
    """An image's file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def write_archive(path: Path, samples: Iterable[tuple[bytes, str]]) -> Path:
    """Images with their labels as WebDataset's writers leave them, beside a file that nobody reads."""
    with tarfile.open(path, "w") as archive:
        for number, (file, label) in enumerate(samples):
            for ending, content in (("png", file), ("cls", f"{label}\n".encode()), ("json", b"{}")):
                member = tarfile.TarInfo(f"images/{number:03}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def write_images(folder: Path, count: int) -> None:
    """Images as training rows, and the same again as validation rows."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = label_vocabulary(CLASSES)
    vocabulary.save(str(folder / TOKENIZER))
    files = [file_of(image_of(number)) for number in range(count)]
    rows = [image_row(0, number % 3, file) for number, file in enumerate(files)]
    packer = Packer(IMAGE_ROW)
    packer.add(
        Documents(
            tokens_N=np.concatenate(rows),
            lengths_D=np.full(count, IMAGE_ROW, np.int64),
            subsets_D=[""] * count,
            files_D=np.arange(count) // 5,
            records_D=1 + np.arange(count) % 5,
            seen_D=np.arange(count),
            bytes_D=np.array([len(file) for file in files]),
            contents_D=files,
        )
    )
    write_shards(folder, packer, vocabulary, kind="images", row_length=IMAGE_ROW, documents=count)
