"""An imitation of the Hugging Face hub over HTTP: folders below one, each a repository of one commit.

OWNER/MODEL is a model, datasets/OWNER/NAME are data.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote

_COMMIT = "0" * 39 + "1"
_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)(/(?P<what>\S+?)/(?P<commit>[^/]+)/?(?P<path>.*))?"
)
_FILE = re.compile(r"/(?P<name>(datasets/)?[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)")


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """The address of a hub, for HF_ENDPOINT, as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            asked = unquote(self.path.partition("?")[0])
            posted = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
            api, file = _API.fullmatch(asked), _FILE.fullmatch(asked)
            found = api or file
            if found is None:
                return self._refuse("EntryNotFound")
            repository = folder / ("datasets" if api and api["kind"] == "datasets" else "") / found["name"]
            if not repository.is_dir():
                return self._refuse("RepoNotFound")
            if file:
                return self._give(repository / file["path"])
            assert api
            match api["what"]:
                case "tree" if not (repository / api["path"]).is_dir():
                    self._refuse("EntryNotFound")
                case "tree":
                    self._tell([_entry(path, repository) for path in sorted((repository / api["path"]).rglob("*"))])
                case "paths-info":
                    paths = [repository / path for path in posted["paths"]]
                    self._tell([_entry(path, repository) for path in paths if path.exists()])
                case _:
                    files = [{"rfilename": path.name} for path in sorted(repository.iterdir())]
                    told = {"id": api["name"], "sha": _COMMIT, "siblings": files, "tags": []}
                    self._tell(told | ({"modelId": api["name"]} if api["kind"] == "models" else {}))

        def _tell(self, told: Any) -> None:
            self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

        def _give(self, path: Path) -> None:
            if not path.is_file():
                return self._refuse("EntryNotFound", {"X-Repo-Commit": _COMMIT})
            content = path.read_bytes()
            headers = {"X-Repo-Commit": _COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, last = map(int, wanted.groups())
                headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
                return self._send(206, content[start : last + 1], headers)
            return self._send(200, content, headers)

        def _refuse(self, code: str, headers: dict[str, str] | None = None) -> None:
            self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: what is asked is no news."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _entry(path: Path, repository: Path) -> dict[str, Any]:
    told = {"path": str(path.relative_to(repository))}
    if path.is_dir():
        return told | {"type": "directory", "oid": hashlib.sha1(told["path"].encode()).hexdigest()}
    content = path.read_bytes()
    return told | {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
