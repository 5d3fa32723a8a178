"""Blocks of labelled images into rows."""

import io
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from tokendrop.config.data import DataConfig
from tokendrop.data.prepare.tokenize import Shares, as_lists, split_of
from tokendrop.data.read.image_rows import image_row
from tokendrop.data.shards.format import SPLITS
from tokendrop.errors import first_line

_THINNEST = 20
"""Of an image, its longer side over the other: brought to a model's size, a thinner one takes too much memory."""


def build_image_rows(data: DataConfig, labels: Sequence[str]) -> Callable[[pa.Table], pa.Table]:
    """What gives the records of a block their rows, and the split that each goes to.

    Args:
        labels: the classes in their order.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    return partial(_image_rows, numbers=numbers, shares=(data.validation_share, data.test_share))


def _image_rows(block: pa.Table, *, numbers: dict[str, int], shares: Shares) -> pa.Table:
    rows: list[NDArray[np.uint32]] = []
    splits: list[int] = []
    reasons: list[str] = []
    contents: list[bytes] = block.column("content").to_pylist()
    columns = (block.column(name).to_pylist() for name in ("text", "split", "reason"))
    for content, label, split, reason in zip(contents, *columns, strict=True):
        split_number = SPLITS.index(split or split_of(content, shares))
        reason = reason or (_fault(content, label, numbers) if content else "")
        is_row = content and not reason
        rows.append(image_row(split_number, numbers[label], content) if is_row else np.empty(0, np.uint32))
        splits.append(split_number)
        reasons.append(reason)
    return pa.table(
        {
            "tokens": as_lists(rows, np.uint32),
            "sentences": as_lists([np.empty(0)] * len(rows), np.int64),
            "split": pa.array(splits, pa.int8()),
            "bytes": pa.array([len(content) for content in contents], pa.int64()),
            "reason": pa.array(reasons, pa.string()),
            **{name: block.column(name) for name in ("content", "error", "file", "record", "subset")},
        }
    )


def _fault(content: bytes, label: str, numbers: dict[str, int]) -> str:
    """Why an image is no sample; empty where it is one."""
    if label not in numbers:
        names = [*numbers]
        return f"want a label of {', '.join(names[:3])} ... {names[-1]}, got {label[:80]!r}"
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            short, long = sorted(image.size)
    except UnidentifiedImageError:
        return "not an image that can be read (of no format that is known)"
    except Exception as error:  # Pillow raises whatever its readers do
        return f"not an image that can be read ({first_line(error)[:80]})"
    return f"of {short} x {long} pixels; want sides within 1:{_THINNEST}" if long > _THINNEST * short else ""
