"""Token shards in a store that is slow and fails, and caches of them."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from folders import numbered_rows, write_folder
from stores import flaky_store
from tokendrop import atomic
from tokendrop.atomic import exclusive_lock
from tokendrop.config.data import CacheConfig
from tokendrop.data.shards import store
from tokendrop.data.shards.cache import open_stored
from tokendrop.data.shards.format import MANIFEST, ORIGIN, SHARDS, TOKENIZER, ShardFile
from tokendrop.data.shards.manifest import read_manifest

PLENTY = 10**9


@contextmanager
def stored(shards: int, *, rows_per_shard: int = 2, **faults: object) -> Iterator[tuple[Path, str, Path, int]]:
    """A folder of numbered rows, the URI of its copy, a folder for a cache, and the bytes of the largest shard."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prepared"
        write_folder(folder, numbered_rows(shards * rows_per_shard), rows_per_shard=rows_per_shard)
        size = max(shard.bytes for shard in read_manifest(folder).shards)
        with flaky_store(folder, **faults) as uri:  # pyright: ignore[reportArgumentType]
            yield folder, uri, Path(name) / "cache", size


def opened(uri: str, cache: Path, most: int = PLENTY, **known: object) -> Path:
    return open_stored(uri, CacheConfig(folder=str(cache), max_bytes=most), **known)  # pyright: ignore[reportArgumentType]


def train_shards(folder: Path) -> list[ShardFile]:
    return read_manifest(folder).of("corpus", "train")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.arrow")}


def bytes_in(cache: Path) -> int:
    """Of all shards and of what becomes one, at a moment when nobody puts any there."""
    with exclusive_lock(cache):
        described = (MANIFEST, SHARDS, TOKENIZER, ORIGIN)
        return sum(path.stat().st_size for path in cache.glob("*/*") if path.is_file() and path.name not in described)


@contextmanager
def in_no_time() -> Iterator[None]:
    """Nobody pauses for long before he asks again, nor waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_FIRST_PAUSE_S", 0.001)
        patch.setattr(atomic, "_POLL_S", 0.001)
        patch.setattr(os, "fsync", lambda file: None)
        yield


def until(what: Callable[[], bool], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)
