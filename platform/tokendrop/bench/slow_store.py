"""Token shards behind a slow link: a folder of this machine as an object store that is far away."""

import io
import time
from pathlib import Path
from typing import Any, ClassVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tokendrop.config.data import CacheConfig
from tokendrop.data.shards.cache import open_stored

LATENCY_S, BYTES_PER_S = 0.02, 50e6
"""Of each request, and of one connection."""

_SCHEME = "slow"


class SlowStore(LocalFileSystem):
    """Files of this machine, each read by one request over a connection of its own."""

    protocol = _SCHEME
    cachable = False
    reads: ClassVar[list[float]] = []
    """When each file was there, by the monotonic clock."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix(f"{_SCHEME}://"))

    def _open(self, path: Any, mode: str = "rb", **_: Any) -> Any:
        assert mode == "rb", mode
        content = Path(path).read_bytes()
        time.sleep(LATENCY_S + len(content) / BYTES_PER_S)
        self.reads.append(time.monotonic())
        return io.BytesIO(content)

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        time.sleep(LATENCY_S)
        return cast("dict[str, Any]", super().info(path, **kwargs))


def behind_slow_link(folder: Path, cache: Path) -> Path:
    """Token shards that come from there as they are read, into a cache on this machine; the folder to open."""
    fsspec.register_implementation(_SCHEME, SlowStore, clobber=True)
    return open_stored(f"{_SCHEME}://{folder}", CacheConfig(folder=str(cache)))
