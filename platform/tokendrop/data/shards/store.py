"""Files of a folder in an object store, asked for again while the store is slow, throttles or fails."""

import random
import re
import time
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import pyarrow.fs as pafs

from tokendrop.data.corpus.sources import open_store, public_name, reaching
from tokendrop.errors import DamagedDataError, UserError

Found = TypeVar("Found")

PATIENCE_S = 300.0
"""So long a store is asked again; what the driver asks first has less."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 20.0
_MOST_DAMAGED = 3  # downloads of a file in a row

# what a store will not say otherwise the next time
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, UserError)
_FINAL_TEXTS = re.compile(
    "NO_SUCH_BUCKET|Bucket '.*' not found|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH"
)


class MissingError(UserError):
    """The store has no such file, or no such bucket."""


class LocalFileError(Exception):
    """What a file of this machine raises amid a request, which is no store's failure."""

    def __init__(self, said: OSError) -> None:
        super().__init__(said)
        self.said = said


class StoredFolder:
    """A folder of files behind a URI: s3:// and gs:// by pyarrow, as corpora are read, all others by fsspec."""

    key = "data.folder"
    """Of the job, for messages."""
    wanted = "a folder that 'tokendrop prepare' made, copied there whole"

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self.url, self.patience_s = url, patience_s

    def read(self, file: str, fault: Callable[[bytes], str] = lambda content: "") -> bytes:
        """All of a file.

        Args:
            fault: what is wrong with such bytes; empty where nothing is.
        Raises:
            UserError: the store does not have it, or did not give it within `patience_s`.
            DamagedDataError: it came damaged again and again.
        """
        what = ""
        for _ in range(_MOST_DAMAGED):
            content = self.asking(file, lambda: self._content(file))
            if not (what := fault(content)):
                return content
        raise DamagedDataError(
            f"{self.key}: {self.name(file)}: damaged ({what}), {_MOST_DAMAGED} times; want it copied there again"
        )

    def sizes(self) -> dict[str, int]:
        """Bytes of each file in the folder, by name; raises UserError as `read` does."""
        return self.asking("", self._sizes)

    def name(self, file: str) -> str:
        """The URI of a file, or of the folder itself, as messages have it."""
        return "/".join(filter(None, [public_name(self.url).rstrip("/"), file]))

    def asking(self, file: str, ask: Callable[[], Found], *, doing: str = "read") -> Found:
        """What a store answers in the end.

        Args:
            doing: what is asked for, in messages.
        Raises:
            MissingError: there is no such file.
            UserError: the store refuses, or has failed for `patience_s`.
            OSError: what `ask` raises as a LocalFileError.
        """
        end, pause_s = None, _FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except FileNotFoundError:
                raise MissingError(
                    f"{self.key}: {self.name(file)}: there is no such file or bucket; want {self.wanted}"
                ) from None
            except LocalFileError as error:
                raise error.said from None
            except Exception as error:
                end = end or time.monotonic() + self.patience_s  # not before: a large file may take longer by itself
                is_over = time.monotonic() + pause_s > end
                if is_over or isinstance(error, _FINAL) or _FINAL_TEXTS.search(str(error)):
                    tried = f", tried for {self.patience_s:g} s" if is_over else ""
                    with reaching(f"{self.key}: can't {doing} {self.name(file)}{tried}"):
                        raise
            time.sleep(pause_s * random.uniform(0.5, 1))  # or all workers would come back at once
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @cached_property
    def opened(self) -> tuple[pafs.FileSystem, str]:
        """The store, and the path of the folder in it."""
        store, path, _ = open_store(self.url)
        return store, path.rstrip("/")

    def _content(self, file: str) -> bytes:
        store, path = self.opened
        with store.open_input_file(f"{path}/{file}") as opened:  # whose `read` is one request
            return opened.read()

    def _sizes(self) -> dict[str, int]:
        store, path = self.opened
        return {found.base_name: found.size for found in store.get_file_info(pafs.FileSelector(path)) if found.is_file}
