"""Token shards of a store on a node: kept in a folder for all workers there, as many as there is room for.

    FOLDER/.lock            held by the process that makes room and puts a shard there
    FOLDER/.fetching/03/    its lock is held by the process that fetches a shard whose name falls there
    FOLDER/.arriving/    a folder as below while it is copied
    FOLDER/0123456789abcdef/    one folder of the store, named by a hash of what it holds
        manifest.json, shards.jsonl, tokenizer.json    copied when it is first opened
        origin.json         where it is from
        NAME.arrow          whole or not there; last needed when it was last changed

A shard that is removed while a process maps it stays readable there, as POSIX has it, and its bytes are freed once it
is not mapped any more. What goes first was needed longest ago, and readers have let go of it: see `Rows.expect`.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokendrop.atomic import atomic_write, exclusive_lock, remove_partial
from tokendrop.config.data import CacheConfig, DataConfig
from tokendrop.data.shards.files import DIFFERS, difference
from tokendrop.data.shards.format import FORMAT, MANIFEST, ORIGIN, SHARDS, TOKENIZER, ShardFile, telling_damage
from tokendrop.data.shards.manifest import Manifest, read_manifest
from tokendrop.data.shards.store import PATIENCE_S, StoredFolder
from tokendrop.errors import DamagedDataError, UserError

Opened = TypeVar("Opened")

_FETCHING, _SLOTS = ".fetching", 32
_ARRIVING = ".arriving"
_NAME_LETTERS = 16
_ROOM = threading.Lock()  # before the lock of the folder, for which other threads would wait by looking again and again


class ShardCache:
    """One folder of token shards of a store on this node."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: as `open_stored` gives it.
        """
        origin = json.loads((folder / ORIGIN).read_bytes())
        self.folder, self.root, self.max_bytes = folder, folder.parent, int(origin["max_bytes"])
        self.store = StoredFolder(origin["url"])

    def opened(self, shard: ShardFile, read: Callable[[ShardFile], Opened]) -> Opened:
        """What `read` makes of a shard's file, which is there when it is called.

        Raises:
            UserError: the store does not give it, or the disk takes no more.
            DamagedDataError: it came damaged, or `read` found it so.
        """
        while True:
            self.fetch(shard)
            try:
                return read(shard)
            except DamagedDataError:
                if self.has(shard):
                    raise  # else another process made room just then

    def has(self, shard: ShardFile) -> bool:
        """Whether a shard is here; if so, it counts as needed now."""
        path = self.folder / shard.file
        with suppress(FileNotFoundError):
            if path.stat().st_size == shard.bytes:
                now = time.time_ns()
                os.utime(path, ns=(now, now))
                return True
        return False

    def fetch(self, shard: ShardFile, *, soon: Collection[str] = (), is_ahead: bool = False) -> None:
        """Have a shard here; where another thread or process fetches it, wait for that.

        Args:
            soon: files that are needed soon; to make room, others go first.
            is_ahead: whether it is one of them, for which none of the others has to go: then it may stay away.
        Raises:
            UserError, DamagedDataError: as of `opened`.
        """
        if self.has(shard) or (is_ahead and not self._has_room(shard.bytes, soon)):
            return
        with exclusive_lock(self.root / _FETCHING / _slot(shard.file)):
            if self.has(shard):
                return
            content = self.store.read(shard.file, partial(_fault, shard))
            try:
                with _ROOM, exclusive_lock(self.root):
                    if _make_room(self.root, self.max_bytes - len(content), soon, must=not is_ahead):
                        atomic_write(self.folder / shard.file, content)
                        self.has(shard)  # for the kernel's own time of a change is some milliseconds late
            except OSError as error:
                raise UserError(
                    f"data.cache.folder: {self.root} can't be written ({error.strerror or error}); want a disk with"
                    " room, or a lower data.cache.max_bytes"
                ) from None

    def fetch_ahead(self, shard: ShardFile, soon: Collection[str]) -> None:
        """As `fetch`, for a shard that is needed soon."""
        self.fetch(shard, soon=soon, is_ahead=True)

    def check(self, manifest: Manifest) -> None:
        """Raises UserError where the store lacks a shard or has one cut short, as after a copy that did not end."""
        sizes = self.store.sizes()
        wanted = zip(*(manifest.table[key].to_pylist() for key in ("file", "bytes")), strict=True)
        wrong = [file for file, size in wanted if sizes.get(file) != size]
        if wrong:
            raise UserError(
                f"data.folder: {self.store.name(wrong[0])} is missing or cut short, and so are {len(wrong) - 1} more of"
                f" {manifest.table.num_rows} shards; want the whole folder copied there again"
            )

    def _has_room(self, size: int, soon: Collection[str]) -> bool:
        for file in soon:
            with suppress(FileNotFoundError):
                size += (self.folder / file).stat().st_size
        return size <= self.max_bytes


def cache_of(folder: Path) -> ShardCache | None:
    """The cache that a folder of token shards is; None where it is one that preparation made."""
    return ShardCache(folder) if (folder / ORIGIN).exists() else None


def open_stored(url: str, cache: CacheConfig, *, name: str | None = None, patience_s: float = PATIENCE_S) -> Path:
    """The folder on this node for a prepared folder in a store; its manifest is there, its shards come as needed.

    Args:
        name: of the folder, where what the store has to hold is known. With its manifest here, the store is not asked.
    Raises:
        UserError: no whole folder of token shards is there, the store does not answer, or it holds others than `name`.
    """
    root = Path(os.path.expanduser(cache.folder))
    if name is None or not (root / name / ORIGIN).exists():
        found = _copy_manifest(StoredFolder(url, patience_s=patience_s), root)
        if name not in (None, found):
            raise UserError(f"data.folder: {url}: other token shards than when the run began; want those")
        name = found
    origin = json.dumps({"url": url, "max_bytes": cache.max_bytes}).encode()
    path = root / name / ORIGIN
    if not path.exists() or path.read_bytes() != origin:
        with exclusive_lock(root):  # whose holders remove what they find half written
            atomic_write(path, origin)
    return path.parent


def folder_here(data: DataConfig, folder: Path) -> Path:
    """The folder from which this node reads a job's token shards.

    Args:
        folder: the one of the driver.
    Raises:
        UserError: as `open_stored`.
    """
    return open_stored(data.folder, data.cache, name=folder.name) if data.is_stored else folder


def _copy_manifest(store: StoredFolder, root: Path) -> str:
    """Copy what describes a folder of token shards into a folder of its own, once it is whole; its name."""
    contents = {file: store.read(file) for file in (MANIFEST, SHARDS, TOKENIZER)}
    arriving = root / _ARRIVING
    with exclusive_lock(root):  # so nobody else is writing there
        _remove_left_overs(root)
        try:
            arriving.mkdir()
            for file, content in contents.items():
                atomic_write(arriving / file, content)
            name = _checked(arriving)
            if not (root / name).exists():
                arriving.rename(root / name)
        except UserError as error:
            raise type(error)(f"data.folder: {error}".replace(str(arriving), store.name(""))) from None
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
    return name


def _checked(folder: Path) -> str:
    """A name for what a folder holds, by its manifest; UserError where that is not whole."""
    manifest = read_manifest(folder)
    if not manifest.header.is_complete:
        raise UserError(
            f"{folder}: not prepared to the end; want all of it copied there once 'tokendrop prepare' is done"
        )
    wanted = manifest.header.tokenizer_sha256
    with telling_damage(folder / TOKENIZER):
        if what := difference(folder / TOKENIZER, wanted):
            raise ValueError(what)
    shards = [manifest.table[key].to_pylist() for key in ("file", "sha256")]
    return hashlib.sha256(json.dumps([FORMAT, wanted, *shards]).encode()).hexdigest()[:_NAME_LETTERS]


def _fault(shard: ShardFile, content: bytes) -> str:
    if len(content) != shard.bytes:
        return f"want {shard.bytes} bytes, got {len(content)}"
    return "" if hashlib.sha256(content).hexdigest() == shard.sha256 else DIFFERS


def _slot(file: str) -> str:
    return f"{int(hashlib.sha256(file.encode()).hexdigest(), 16) % _SLOTS:02}"


def _folders_in(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _remove_left_overs(root: Path) -> None:
    """Remove what processes left that were killed; for those who hold the lock of the folder."""
    shutil.rmtree(root / _ARRIVING, ignore_errors=True)
    for folder in _folders_in(root):
        remove_partial(folder)


def _shards_in(root: Path) -> list[tuple[int, int, Path]]:
    """When each shard was needed, its bytes and its path."""
    found: list[tuple[int, int, Path]] = []
    for folder in _folders_in(root):
        with os.scandir(folder) as files:
            for file in files:
                if file.name.endswith(".arrow"):
                    with suppress(FileNotFoundError):  # somebody cleans up by hand, or makes room meanwhile
                        told = file.stat()
                        found.append((told.st_mtime_ns, told.st_size, folder / file.name))
    return found


def _make_room(root: Path, most: int, soon: Collection[str], *, must: bool) -> bool:
    """Remove shards until the others take at most so many bytes, those that were needed longest ago first.

    Args:
        must: also those that are needed soon, where the others are not enough; else nothing is removed then.
    Returns:
        Whether there is room, or must be.
    """
    _remove_left_overs(root)
    shards = sorted(_shards_in(root), key=lambda one: (one[2].name in soon, one[0]))
    left, going = sum(size for _, size, _ in shards), list[Path]()
    for _, size, path in shards:
        if left <= most or (path.name in soon and not must):
            break
        going.append(path)
        left -= size
    if left > most and not must:
        return False
    for path in going:
        path.unlink(missing_ok=True)
    return True
