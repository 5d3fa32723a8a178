"""Whether token shards are as they were written, byte by byte."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokendrop.data.shards.files import DIFFERS, difference, map_shard
from tokendrop.data.shards.format import ORIGIN, TOKENIZER, ShardFile, remedy, row_checksum
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import DamagedDataError

_MOST_NAMED = 5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A file that is not what it was."""

    file: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What became of a folder of token shards."""

    folder: str
    shards: int
    rows: int
    bytes: int
    damaged: tuple[Damage, ...]
    remedy: str
    """What to do about the damage; empty where nothing is damaged, or the folder is not one that preparation made."""


def verify(folder: Path, *, progress: Progress = lambda done, size: None) -> Verification:
    """Compare every committed shard and the tokenizer with their checksums; those of rows tell where a shard differs.

    Where shards come from a store when they are read, those that are here are compared.

    Args:
        progress: told the bytes read and those that there are.
    Raises:
        DamagedDataError: the manifest, which has the checksums, can't be read.
    """
    manifest = read_manifest(folder)
    is_cache = (folder / ORIGIN).exists()
    shards = [shard for shard in manifest.shards if not is_cache or (folder / shard.file).exists()]
    size = sum(shard.bytes for shard in shards)
    wrong: list[Damage] = []
    if what := difference(folder / TOKENIZER, manifest.header.tokenizer_sha256):
        wrong.append(Damage(file=TOKENIZER, what=what))
    done = 0
    # sha256 lets other threads run
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        check = partial(_damage, folder, row_length=manifest.header.row_length)
        for shard, what in zip(shards, pool.map(check, shards), strict=True):
            if what:
                wrong.append(Damage(file=shard.file, what=what))
            done += shard.bytes
            progress(done, size)
    rows = sum(shard.rows for shard in shards)
    return Verification(
        folder=str(folder),
        shards=len(shards),
        rows=rows,
        bytes=size,
        damaged=tuple(wrong),
        remedy=remedy(folder) if wrong else "",
    )


def _damage(folder: Path, shard: ShardFile, *, row_length: int) -> str:
    """What is wrong with a shard; empty when nothing is."""
    path = folder / shard.file
    what = difference(path, shard.sha256, size=shard.bytes)
    if what != DIFFERS:
        return what
    try:
        rows_NT, checks_N = map_shard(path, (shard.rows, row_length))
    except DamagedDataError:
        return f"{what}; no rows can be read from it"
    rows = [number for number, row in enumerate(rows_NT) if row_checksum(row) != checks_N[number]]
    if not rows:
        return f"{what}; its rows are as they were"
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"{what}; changed rows: {', '.join(map(str, rows[:_MOST_NAMED]))}{more}"
