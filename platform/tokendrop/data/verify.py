"""Whether token shards are as they were written, byte by byte."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokendrop.data.shards import TOKENIZER, Shard, map_shard, read_manifest, row_checksum
from tokendrop.errors import UserError

_DIFFERS = "its sha256 is not the manifest's"
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


def verify(folder: Path, *, progress: Progress = lambda done, size: None) -> Verification:
    """Read every committed shard and the tokenizer, and compare them with the checksums of files and rows.

    Args:
        progress: told the bytes read and those that there are.
    Raises:
        UserError: the manifest, which has the checksums, can't be read.
    """
    manifest = read_manifest(folder)
    shards, size = manifest.shards, sum(shard.bytes for shard in manifest.shards)
    wrong: list[Damage] = []
    if what := _changed(folder / TOKENIZER, manifest.header.tokenizer_sha256):
        wrong.append(Damage(file=TOKENIZER, what=what))
    done = 0
    # sha256 and xxh3 let other threads run
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        check = partial(_damage, folder, row_length=manifest.header.row_length)
        for shard, what in zip(shards, pool.map(check, shards), strict=True):
            if what:
                wrong.append(Damage(file=shard.file, what=what))
            done += shard.bytes
            progress(done, size)
    rows = sum(shard.rows for shard in shards)
    return Verification(folder=str(folder), shards=len(shards), rows=rows, bytes=size, damaged=tuple(wrong))


def _damage(folder: Path, shard: Shard, *, row_length: int) -> str:
    """What is wrong with a shard; empty when nothing is."""
    path = folder / shard.file
    what = _changed(path, shard.sha256, size=shard.bytes)
    if what and what != _DIFFERS:
        return what
    try:
        rows_NT, checks_N = map_shard(path, (shard.rows, row_length))
    except UserError:
        return "; ".join(filter(None, [what, "no rows can be read from it"]))
    rows = [number for number, row in enumerate(rows_NT) if row_checksum(row) != checks_N[number]]
    if not rows:
        return f"{what}; its rows are as they were" if what else ""
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    named = ", ".join(map(str, rows[:_MOST_NAMED]))
    return "; ".join(filter(None, [what, f"changed rows: {named}{more}"]))


def _changed(path: Path, sha256: str, *, size: int | None = None) -> str:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if size is not None and found != size:
                return f"want {size} bytes, found {found}"
            return "" if hashlib.file_digest(file, "sha256").hexdigest() == sha256 else _DIFFERS
    except OSError as error:
        return error.strerror or str(error)
