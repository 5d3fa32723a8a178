"""What a process reads from files, counted where it happens: no file is another one, and none is left out."""

import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class _Counted(io.BufferedReader):
    """A file that counts the bytes it gives."""

    def __init__(self, path: Path, counts: Counter[str]) -> None:
        super().__init__(io.FileIO(path))
        self.file, self.counts = path.name, counts

    def read(self, *size: Any) -> bytes:
        content = super().read(*size)
        self.counts[self.file] += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        self.counts[self.file] += size
        return size


@contextmanager
def counted_reads(below: Path) -> Iterator[Counter[str]]:
    """Bytes read meanwhile from files below a folder, by name; 0 for one that was opened in another way."""
    counts, opened, open_file = Counter[str](), set[str](), Path.open

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{below}/"):
            opened.add(Path(str(arguments[0])).name)

    def open_counted(path: Path, mode: str = "r", *more: Any, **others: Any) -> Any:
        if mode == "rb" and path.is_relative_to(below):
            return _Counted(path, counts)
        return open_file(path, mode, *more, **others)

    sys.addaudithook(note)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "open", open_counted)
        yield counts
    for name in opened:
        counts[name] += 0
