"""What a file holds: its bytes, unpacked, and their lines."""

import io
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from tokendrop.data.corpus.sources import SourceFile, check_unchanged, reaching
from tokendrop.errors import UserError

# An object store is asked for this much at a time; each request costs it some 50 ms.
_STORE_READ_BYTES = 8 * 2**20

# A decompressor that fails loses what it was asked for last, so it is asked for little at a time.
_LINE_READ_BYTES, _UNPACKED_READ_BYTES = 2**17, 2**13
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

    def __init__(self, file: SourceFile, *, seekable: bool = False) -> None:
        """
        Args:
            seekable: whether `seek` is needed; a file that is read from start to end comes in larger requests.
        Raises:
            UserError: the store does not give the file.
        """
        self._file, self._seekable = file, seekable
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
        """At most what the file held when it was listed, however much a damaged length asks for.

        Raises:
            UserError: its store can't be reached, or ends it early.
        """
        left = self._file.size - self._position
        size = left if size is None or size < 0 else min(size, left)
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


def store_read_bytes(file: SourceFile) -> int:
    """How many bytes to ask a file's store for at a time."""
    return 2**20 if isinstance(file.store, pafs.LocalFileSystem) else _STORE_READ_BYTES


def read_lines(file: SourceFile, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file, unpacked, each with its number from 1 and with its end.

    Lines end at "\\n" alone: U+2028 and its like belong to the text. A damaged compressed file gives the lines that
    were decompressed before the damage, the same ones each time. The last 2 MB before it may be missing, because a
    decompressor that fails loses its buffer.

    Args:
        longest: bytes of a line without its end; None stands for a line that is longer.
    Raises:
        DamageError: the file is damaged or cut short from here on.
        UserError: the store fails.
    """
    codec = next((codec for suffix, codec in _CODECS.items() if file.name.endswith(suffix)), None)
    number = 0
    with SourceBytes(file) as raw:
        stream: Any = pa.CompressedInputStream(raw, codec) if codec else raw
        lines = io.BufferedReader(stream, _UNPACKED_READ_BYTES if codec else _LINE_READ_BYTES)
        try:
            while (line := _line(lines, longest)) != b"":
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
