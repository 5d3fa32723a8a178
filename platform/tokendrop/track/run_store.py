"""Runs in an object store: their addresses, their places on this machine, and their files, read and written."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import pyarrow.fs as pafs

from tokendrop.config.files import not_a_runs_folder
from tokendrop.data.corpus.sources import public_name
from tokendrop.data.shards.store import LocalFileError, StoredFolder
from tokendrop.errors import UserError

PLACE = "TOKENDROP_STORED_RUNS"
"""The environment variable that names the folder of a machine in which it keeps its copies of runs of stores."""
_DEFAULT_PLACE = "~/.cache/tokendrop/runs"
FIRST_PATIENCE_S = 20.0  # for a store that is asked before anything has begun
_CHUNK_BYTES = 2**23
_HELD_BYTES = 2**26  # of a file, in memory
_THREADS = 8
_NAME_LETTERS = 12

Told = tuple[int, int]
"""Bytes of a file in a store, and when it was written, in ns: another pair means another file."""


class RunStore(StoredFolder):
    """A folder of a store in which a run lies, or several."""

    key = "runs_folder"
    wanted = "the address of a run, or of a bucket that is there"

    def files(self, below: str = "", *, recursive: bool = True) -> dict[str, Told]:
        """All files below a folder of this one, by their names from this one on; none where there is no such folder."""
        return self.asking(below, partial(self._files, below, recursive))

    def folders(self) -> list[str]:
        """Names of the folders right in this one."""
        return self.asking("", self._folders)

    def has(self, file: str) -> bool:
        """Whether a file is there."""
        return self.asking(file, partial(self._is_file, file))

    def fetch(self, file: str, to: Path) -> None:
        """Copy a file from there; it is whole or not there, and not held in memory.

        Raises:
            MissingError: there is no such file.
            UserError: the store does not give it.
            OSError: it can't be written here.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        partial_path = to.with_name(f".{to.name}.{uuid4().hex[:8]}")
        try:
            self.asking(file, partial(self._copy_from, file, partial_path))
            partial_path.rename(to)
        finally:
            partial_path.unlink(missing_ok=True)

    def fetch_all(self, files: Iterable[tuple[str, Path]]) -> None:
        """The same for several files, some at a time."""
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(lambda one: self.fetch(*one), list(files)):
                pass

    def put(self, file: str, content: Path | bytes, *, before: Callable[[], object] = bool) -> None:
        """Write a file there, whole or not at all.

        Args:
            before: called before each try; what it raises ends them.
        Raises:
            UserError: the store does not take it.
            OSError: a file of this machine can't be read.
        """
        self.asking(file, lambda: (before(), _uninterrupted(partial(self._copy_to, file, content))), doing="write")

    def remove(self, file: str, *, before: Callable[[], object] = bool) -> None:
        """Remove a file there, as `put` writes one; one that is gone already is no error."""
        self.asking(file, lambda: (before(), self._remove(file)), doing="remove")

    def _files(self, below: str, recursive: bool) -> dict[str, Told]:
        store, root = self.opened
        path = f"{root}/{below}".rstrip("/")
        found = store.get_file_info(pafs.FileSelector(path, recursive=recursive, allow_not_found=True))
        return {info.path[len(root) + 1 :]: (info.size, info.mtime_ns or 0) for info in found if info.is_file}

    def _folders(self) -> list[str]:
        store, root = self.opened
        found = store.get_file_info(pafs.FileSelector(root, allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)

    def _is_file(self, file: str) -> bool:
        store, root = self.opened
        return store.get_file_info(f"{root}/{file}").is_file

    def _copy_from(self, file: str, to: Path) -> None:
        store, root = self.opened
        with store.open_input_stream(f"{root}/{file}", compression=None) as source:
            with _of_this_machine():
                copy = to.open("wb")
            try:
                while chunk := source.read(_CHUNK_BYTES):
                    with _of_this_machine():
                        copy.write(chunk)
                with _of_this_machine():
                    copy.flush()
                    os.fsync(copy.fileno())
            finally:
                with suppress(OSError):  # again of what was just told
                    copy.close()

    def _copy_to(self, file: str, content: Path | bytes) -> None:
        store, root = self.opened
        if isinstance(content, Path):
            with _of_this_machine():
                if content.stat().st_size <= _HELD_BYTES:
                    content = content.read_bytes()
        if isinstance(content, Path):
            self._stream_to(f"{root}/{file}", content)
            return
        with store.open_output_stream(f"{root}/{file}", compression=None) as out:
            out.write(content)

    def _stream_to(self, path: str, content: Path) -> None:
        """Arrow sends what it is given in the background, however much that is, and can't give up what it has begun."""
        store, _ = self.opened
        out = store.open_output_stream(path, compression=None)
        try:
            for chunk in _chunks(content):
                out.write(chunk)
                if out.tell() % _HELD_BYTES == 0:
                    out.flush()  # waits until all of that is there
            out.close()
        except BaseException:
            with suppress(Exception):
                out.close()
                store.delete_file(path)  # it is cut short
            raise

    def _remove(self, file: str) -> None:
        store, root = self.opened
        with suppress(FileNotFoundError):
            store.delete_file(f"{root}/{file}")


@contextmanager
def _of_this_machine() -> Iterator[None]:
    """Around what is done to files here, whose errors are not the store's."""
    try:
        yield
    except OSError as error:
        raise LocalFileError(error) from error


def _chunks(file: Path) -> Iterator[bytes]:
    with _of_this_machine(), file.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk


def _uninterrupted(write: Callable[[], None]) -> None:
    """Write to the end, though Ctrl-C comes meanwhile: Arrow completes whatever it has begun, cut short or not."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        write()
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(write).result()


def address_below(address: str, name: str) -> str:
    """The address of a folder in that of another one, whose query stays behind it."""
    folder, mark, query = address.partition("?")
    return f"{folder.rstrip('/')}/{name}{mark}{query}"


def runs_place(runs_folder: str) -> Path:
    """The folder on this machine for a job's runs: `runs_folder` itself, or where copies of those in a store lie.

    Raises:
        UserError: it is neither a path nor the address of a store.
    """
    if reason := not_a_runs_folder(runs_folder):
        raise UserError(f"runs_folder: {reason}")
    if "://" not in runs_folder:
        return Path(runs_folder).absolute()
    folder, mark, query = runs_folder.partition("?")
    address = f"{folder.rstrip('/')}{mark}{query}"
    return _copies_here() / hashlib.sha256(address.encode()).hexdigest()[:_NAME_LETTERS]


def workers_place(address: str, node: str) -> Path:
    """The folder on this machine for workers of a run, where they do not see the copy of its driver.

    Args:
        address: of the run.
        node: the id of their node in Ray; another node may share the disk.
    """
    runs_folder, name = split_address(address)
    return _copies_here() / ".nodes" / node[:_NAME_LETTERS] / runs_place(runs_folder).name / name


def _copies_here() -> Path:
    return Path(os.path.expanduser(os.environ.get(PLACE) or _DEFAULT_PLACE)).absolute()


def split_address(address: str) -> tuple[str, str]:
    """The address of the folder that a run lies in, and the run's name.

    Raises:
        UserError: it is not the address of a folder in a bucket.
    """
    if reason := not_a_runs_folder(address):
        raise UserError(f"{public_name(address)}: {reason}")
    folder, mark, query = address.partition("?")
    parent, _, name = folder.rstrip("/").rpartition("/")
    if parent.endswith("/"):
        raise UserError(f"{public_name(address)}: want the address of a run, such as {public_name(folder)}/NAME")
    return f"{parent}{mark}{query}", name


def check_writable(runs_folder: str) -> None:
    """Raises UserError where files can't be written to a job's `runs_folder` of a store, and removed from it."""
    store, tried = RunStore(runs_folder, patience_s=FIRST_PATIENCE_S), f".tried-{uuid4().hex[:8]}"
    store.put(tried, b"by tokendrop, to see whether runs can be written here")
    store.remove(tried)
