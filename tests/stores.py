"""Object stores for tests: one in memory that is slow and fails, and a real protocol that throttles and fails."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tokendrop.data.shards import store

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
INTERNAL = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


class Flaky(MemoryFileSystem):
    """A store in memory: each request takes a while, and may fail or give other bytes than those that it has."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    delay_s = 0.0
    fails: Callable[[], bool] = staticmethod(lambda: False)
    damages: Callable[[str], bool] = staticmethod(lambda path: False)
    read: Counter[str] = Counter()
    """Whole files that were given as they are, by name."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("flaky://"))

    def _open(self, path: str, mode: str = "rb", **keys: Any) -> Any:
        file = super()._open(path, mode, **keys)
        if mode != "rb":
            return file
        time.sleep(self.delay_s)
        if self.fails():
            raise OSError("503 Slow Down")
        content = file.getvalue()
        if self.damages(path):
            content = content[:-1] + bytes([content[-1] ^ 1])
        else:
            self.read[path.rpartition("/")[2]] += 1
        return MemoryFile(self, path, content)


@contextmanager
def flaky_store(
    folder: Path,
    *,
    delay_s: float = 0.0,
    fails: Callable[[], bool] = lambda: False,
    damages: Callable[[str], bool] = lambda path: False,
) -> Iterator[str]:
    """The URI of a copy of a folder in a store like that."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.read.clear()
    Flaky.delay_s, Flaky.fails, Flaky.damages = delay_s, staticmethod(fails), staticmethod(damages)
    for path in folder.iterdir():
        if path.is_file():
            fsspec.filesystem("flaky").pipe(f"/copy/{path.name}", path.read_bytes())
    yield "flaky://copy"
    Flaky.store.clear()


def by_chance(share: float, seed: int) -> Callable[[], bool]:
    """Fails by chance, never more than thrice in a row of requests of one thread."""
    chance, rows = random.Random(seed), threading.local()

    def fails() -> bool:
        now = chance.random() < share and getattr(rows, "length", 0) < 3
        rows.length = getattr(rows, "length", 0) + 1 if now else 0
        return now

    return fails


class Unreliable:
    """moto's S3, which answers some requests for objects with an error."""

    def __init__(self) -> None:
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self.answers: Counter[str] = Counter()
        self.error: Callable[[str, int], tuple[str, bytes] | None] = lambda path, number: None
        """The status and the body for the nth request for an object, counted from 1; None for what S3 says."""
        self.trouble: Callable[[str, str], tuple[str, bytes] | None] = lambda method, path: None
        """The same for any request, of reading and of writing, by its method and path; it may take its time too."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if told := self.trouble(environ["REQUEST_METHOD"], path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _answered(environ, start_response, *told)
        if environ["REQUEST_METHOD"] in ("GET", "HEAD") and path.count("/") > 1:
            self.answers[path] += 1
            if told := self.error(path, self.answers[path]):
                return _answered(environ, start_response, *told)
        return self._app(environ, start_response)


def _answered(environ: dict[str, Any], start_response: Any, status: str, body: bytes) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]


class S3:
    """A bucket of a server on this machine; whoever reads it wants `ENVIRONMENT`."""

    ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key-of-tests", "AWS_SECRET_ACCESS_KEY": "secret-of-tests"}

    def __init__(self, app: Unreliable, port: int) -> None:
        self.app, self._query = app, f"?endpoint_override=127.0.0.1%3A{port}&scheme=http"
        writer = f"s3://{':'.join(self.ENVIRONMENT.values())}@bucket{self._query}&allow_bucket_creation=true"
        self._store, _ = pafs.FileSystem.from_uri(writer)
        self._store.create_dir("bucket")

    def uri(self, path: str) -> str:
        return f"s3://{path}{self._query}"

    def upload(self, folder: Path, name: str) -> str:
        """The URI of a copy of a folder."""
        for path in folder.iterdir():
            if path.is_file():
                with self._store.open_output_stream(f"bucket/{name}/{path.name}", compression=None) as out:
                    out.write(path.read_bytes())
        return self.uri(f"bucket/{name}")

    def remove(self, path: str) -> None:
        self._store.delete_file(path)

    def files(self, path: str) -> set[str]:
        """Names of all files below a folder, from there on."""
        found = self._store.get_file_info(pafs.FileSelector(path, recursive=True, allow_not_found=True))
        return {one.path.removeprefix(f"{path}/") for one in found if one.is_file}

    def content(self, path: str) -> bytes:
        with self._store.open_input_stream(path, compression=None) as file:
            return file.read()

    def write(self, path: str, content: bytes) -> None:
        with self._store.open_output_stream(path, compression=None) as file:
            file.write(content)


@contextmanager
def s3_server() -> Iterator[S3]:
    """A server that is up while the block runs."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Unreliable()
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield S3(app, server.server_port)
    finally:
        server.shutdown()


@contextmanager
def s3_of_this_process() -> Iterator[S3]:
    """Such a server, with its credentials in this process's environment; what fails is tried again soon."""
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        patch.setattr(store, "_FIRST_PAUSE_S", 0.01)
        for name, value in S3.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield server
