"""Rows of labelled images: `split, label, low, high`, the last two the checksum of the image's file.

The file itself lies in the shard beside the row.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

IMAGE_ROW = 4
"""Numbers of a row."""


class ImageRows(NamedTuple):
    """What rows hold."""

    split: int
    """Number of their split, the same for all."""
    labels_B: NDArray[np.int64]
    checksums_B: NDArray[np.uint64]


def image_row(split: int, label: int, content: bytes) -> NDArray[np.uint32]:
    """The row of an image's file."""
    checksum = xxh3_64_intdigest(content)
    return np.array([split, label, checksum & 0xFFFFFFFF, checksum >> 32], np.uint32)


def read_image_rows(rows_BT: NDArray[np.int64]) -> ImageRows:
    """What rows of one split hold."""
    low_B, high_B = rows_BT[:, 2].astype(np.uint64), rows_BT[:, 3].astype(np.uint64)
    return ImageRows(int(rows_BT[0, 0]), rows_BT[:, 1], low_B | high_B << np.uint64(32))


def is_intact(content: bytes, checksum: np.uint64) -> bool:
    """Whether an image's file is the one of its row."""
    return xxh3_64_intdigest(content) == int(checksum)
