"""A store that ends the process which reads some of its files, as a library does that crashes over what they hold."""

import io
import os
import signal
import time
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

_LATE_BYTES, _PIECE_BYTES = 2**20, 2**16


class DeadlyHandler(pafs.FSSpecHandler):
    """Files here; to read one with `deadly` in its name is the end, of one with `late` once a part of it was read."""

    def __init__(self) -> None:
        super().__init__(LocalFileSystem())

    def open_input_stream(self, path: str) -> Any:
        if "late" in path:
            return pa.PythonFile(_Late(path), mode="r")
        if "deadly" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open_input_stream(path)


class _Late(io.FileIO):
    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() >= _LATE_BYTES:
            time.sleep(3)  # for what was read to be handed on
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(_PIECE_BYTES)  # or less than is asked for
