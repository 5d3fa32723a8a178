"""What a file holds: its bytes, unpacked, and their lines."""

import io
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from tokendrop.data.sources import SourceFile, check_unchanged, reaching
from tokendrop.errors import UserError

# An object store is asked for this much at a time; each request costs it some 50 ms.
_STORE_READ_BYTES = 8 * 2**20

_LINE_READ_BYTES = 2**17
_CODECS = {".zst": "zstd", ".gz": "gzip"}
_BOM = b"\xef\xbb\xbf"

BROKEN = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
"""What libraries raise over damaged content."""


DAMAGED = "damaged or cut short from here on"


class DamageError(Exception):
    """Nothing can be read of a file from here on; its text begins with `DAMAGED`."""

    def __init__(self, number: int, error: Exception) -> None:
        """`number`: of the line or row that would be next."""
        letters = " ".join(str(error).split())[:120]
        cause = "".join(letter if letter.isprintable() else "?" for letter in letters)
        super().__init__(f"{DAMAGED} ({cause})")
        self.number = number


class SourceBytes(io.RawIOBase):
    """A file's bytes as they lie in its store, from its start.

    A store that fails raises UserError: whatever else goes wrong with a file is then damage of its content.
    """

    def __init__(self, file: SourceFile, *, seekable: bool = False, slow_from: int | None = None) -> None:
        """`slow_from`: where bytes begin to come one by one."""
        self._file, self._seekable, self._slow_from = file, seekable, slow_from
        self._position = 0
        with reaching(f"can't read {file.name}"):
            if seekable:
                self._stream = file.store.open_input_file(file.path)
            else:
                self._stream = file.store.open_input_stream(
                    file.path, compression=None, buffer_size=store_read_bytes(file)
                )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._seekable

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        if not 0 <= position <= self._file.size:
            raise ValueError("it refers to bytes that it does not have")
        with reaching(f"can't read {self._file.name}"):
            self._stream.seek(position)
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """At most what the file held when it was listed, however much a damaged length asks for."""
        left = self._file.size - self._position
        size = left if size is None or size < 0 else min(size, left)
        if self._slow_from is not None:
            size = min(size, max(1, self._slow_from - self._position))
        pieces: list[bytes] = []
        while size:
            with reaching(f"can't read {self._file.name}"):
                piece = self._stream.read(size)
            if not piece:
                check_unchanged(self._file)
                raise UserError(f"can't read {self._file.name} (its store ends it at byte {self._position})")
            pieces.append(piece)
            self._position += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_stream"):
            self._stream.close()
        super().close()


class UnpackedBytes(io.RawIOBase):
    """A compressed file's content; a file that is damaged gives all that comes before the damage.

    A decompressor that fails keeps what it had of the last pieces. So the file is then read once more, and from
    shortly before that place byte by byte.
    """

    _PIECE_BYTES = 2**16  # of a compressed file that pyarrow takes at a time

    def __init__(self, file: SourceFile, codec: str) -> None:
        self._file, self._codec = file, codec
        self._given = 0
        self._is_slow = False
        self._start(slow_from=None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read(1 if self._is_slow else len(buffer))
        except UserError:
            raise
        except (pa.ArrowException, OSError):
            if self._is_slow:
                raise
            self._is_slow = True
            self._start(slow_from=max(0, self._packed.tell() - 2 * self._PIECE_BYTES))
            self._skip(self._given)
            return self.readinto(buffer)
        self._given += len(content)
        buffer[: len(content)] = content
        return len(content)

    def _start(self, *, slow_from: int | None) -> None:
        self._packed = SourceBytes(self._file, slow_from=slow_from)
        self._stream = pa.CompressedInputStream(self._packed, self._codec)

    def _skip(self, count: int) -> None:
        while count:
            skipped = len(self._stream.read(min(count, 2**20)))
            if not skipped:
                raise OSError("it got shorter")
            count -= skipped


def store_read_bytes(file: SourceFile) -> int:
    """How much to ask a file's store for at a time."""
    return 2**20 if isinstance(file.store, pafs.LocalFileSystem) else _STORE_READ_BYTES


def read_lines(file: SourceFile, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines, ended by "\\n" alone: U+2028 and its like belong to the text. None for one that is too long."""
    codec = next((codec for suffix, codec in _CODECS.items() if file.name.endswith(suffix)), None)
    number = 0
    with UnpackedBytes(file, codec) if codec else SourceBytes(file) as raw:
        stream = io.BufferedReader(raw, _LINE_READ_BYTES)
        try:
            while (line := _line(stream, longest)) != b"":
                number += 1
                yield number, line.removeprefix(_BOM) if line and number == 1 else line
        except UserError:
            raise
        except BROKEN as error:
            raise DamageError(number + 1, error) from None


def _line(stream: io.BufferedIOBase, longest: int) -> bytes | None:
    """The next line with its end, b"" after the last; one that is too long is passed over, not held."""
    piece = stream.readline(_LINE_READ_BYTES)
    pieces, length = [piece], len(piece)
    while len(piece) == _LINE_READ_BYTES and not piece.endswith(b"\n"):
        piece = stream.readline(_LINE_READ_BYTES)
        pieces.append(piece)
        length += len(piece)
        if length > longest + 1:
            pieces.clear()
    return b"".join(pieces) if length - piece.endswith(b"\n") <= longest else None
