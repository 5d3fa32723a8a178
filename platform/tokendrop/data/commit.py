"""Folders and files that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from tokendrop.errors import UserError


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `folder` when the block ends well and goes when it does not.

    Where another process was first, its folder stays: both hold the same.

    Raises:
        UserError: nothing can be written there.
    """
    partial = folder.with_name(f"{folder.name}.partial-{uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: can't make this folder ({error.strerror or error})") from None
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_whole(path: Path, content: Any) -> None:
    """Write a file that is there whole or not at all, even where the machine stops."""
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove the files that `write_whole` left in a folder when it was killed; nobody else may be writing there."""
    for path in folder.glob(".*.????????"):
        path.unlink()
