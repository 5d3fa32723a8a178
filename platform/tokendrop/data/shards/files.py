"""The files of token shards as they are read: what they are, their rows in mapped memory, what a row is made of."""

import hashlib
import os
import stat
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokendrop.data.shards.arrow_layout import read_layout
from tokendrop.data.shards.format import ORIGIN, TOKENIZER, ShardFile, damaged, open_plain, telling_damage
from tokendrop.data.shards.manifest import Manifest

_TOKENS, _CHECKS = 2, 4
"""Their buffers: the columns `tokens` (a list's validity, its numbers' validity, its numbers) and `xxh3_64`."""

_KINDS: dict[int, type[np.uint16] | type[np.uint32]] = {2: np.uint16, 4: np.uint32}  # of tokens, by their bytes

_LOOKERS, _LOOKS = 16, 256  # threads that look at files, and how many at a time

DIFFERS = "its sha256 is not the manifest's"


def check_files(folder: Path, manifest: Manifest) -> None:
    """Look at every file, without reading rows; where shards come from a store when they are read, at the tokenizer.

    Raises:
        DamagedDataError: a shard is missing or cut short, or the tokenizer is another one.
    """
    path = folder / TOKENIZER
    with telling_damage(path):
        if difference(path, manifest.header.tokenizer_sha256):
            raise ValueError("not the tokenizer that made these shards")
    if (folder / ORIGIN).exists():
        return
    parts = manifest.table.select(["file", "bytes"]).to_batches(_LOOKS)
    with ThreadPoolExecutor(_LOOKERS) as pool:  # a shared file system takes its time for each
        deque(pool.map(partial(_check_sizes, folder), parts), maxlen=0)


def _check_sizes(folder: Path, files: pa.RecordBatch) -> None:
    for name, size in zip(*(column.to_pylist() for column in files.columns), strict=True):
        path = folder / name
        with telling_damage(path):
            _check_plain(path, path.lstat(), size)


def _check_plain(path: Path, found: os.stat_result, size: int | None) -> None:
    """ValueError for what is no plain file of so many bytes; any other might keep its reader waiting."""
    if stat.S_ISLNK(found.st_mode):
        raise ValueError(f"a link to {path.readlink()}, want the file itself")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a file")
    if size is not None and found.st_size != size:
        raise ValueError(f"want a file of {size} bytes, found {found.st_size}")


def _map(path: Path, size: int | None) -> pa.Buffer:
    """The mapped bytes of a file, for which its file system is asked once."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        if path.is_symlink():
            raise ValueError(f"a link to {path.readlink()}, want the file itself") from None
        raise
    try:
        _check_plain(path, os.fstat(file), size)
        with pa.memory_map(f"/dev/fd/{file}") as mapped:  # which needs no open file then, as Python's own mmap does
            return mapped.read_buffer()
    finally:
        os.close(file)


def difference(path: Path, sha256: str, *, size: int | None = None) -> str:
    """How a file differs from the one of this sha256; empty where it does not."""
    try:
        with open_plain(path) as file:
            found = os.fstat(file.fileno()).st_size
            if size is not None and found != size:
                return f"want {size} bytes, found {found}"
            return "" if hashlib.file_digest(file, "sha256").hexdigest() == sha256 else DIFFERS
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def map_shard(
    path: Path, shape: tuple[int, int], *, size: int | None = None
) -> tuple[NDArray[np.integer], NDArray[np.uint64]]:
    """The mapped rows of a shard, (N, row_length), and their checksums, (N,).

    The rows may be any numbers: their checksums tell whether they are those that were written.

    Args:
        size: of the file, bytes.
    Raises:
        DamagedDataError: it can't be read, or does not have this shape.
    """
    rows, length = shape
    try:
        content = _map(path, size)
        layout = read_layout(memoryview(content))
        tokens, checks = layout.buffers[_TOKENS], layout.buffers[_CHECKS]
        kind = _KINDS.get(tokens.length // (rows * length))
        if (layout.rows, checks.length) != (rows, 8 * rows) or kind is None or tokens.length % (rows * length):
            raise ValueError(f"want {shape} rows and tokens as the manifest says, found {layout.rows} rows")
        rows_NT = np.frombuffer(content, kind, rows * length, tokens.start).reshape(shape)
        checks_N = np.frombuffer(content, np.uint64, rows, checks.start)
    except (OSError, ValueError, IndexError, pa.ArrowException) as error:
        raise damaged(path, error) from None
    return rows_NT, checks_N


class Contents:
    """The mapped files of a shard's images."""

    def __init__(self, path: Path, rows: int, *, size: int | None = None) -> None:
        """
        Args:
            size: of the shard, bytes.
        Raises:
            DamagedDataError: it can't be read, or does not have so many.
        """
        try:
            self._content = _map(path, size)
            offsets, self._values = read_layout(memoryview(self._content)).buffers[-2:]  # of the last column
            self._offsets_N = np.frombuffer(self._content, np.int64, rows + 1, offsets.start)
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:
            raise damaged(path, error) from None

    def read(self, row: int) -> bytes:
        """The file of a row's image; any bytes where the shard is damaged."""
        start, end = self._offsets_N[row : row + 2].clip(0, self._values.length).tolist()
        return self._content[self._values.start + start : self._values.start + max(start, end)].to_pybytes()


def read_documents(folder: Path, shard: ShardFile, rows: Sequence[int]) -> list[list[dict[str, Any]]]:
    """The documents of each of some rows, as `DOCUMENTS` has them.

    Raises:
        DamagedDataError: the shard is not what was written.
    """
    path = folder / shard.file
    if what := difference(path, shard.sha256, size=shard.bytes):  # pyarrow may not survive a file that is damaged
        raise damaged(path, what)
    with telling_damage(path), pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0).column("documents").take(pa.array(rows, pa.int64())).to_pylist()
