"""An imitation of the Hugging Face hub: folders below one, OWNER/MODEL, each a repository of one commit, over HTTP."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

_COMMIT = "0" * 39 + "1"


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """The address of a hub, for HF_ENDPOINT, as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._tell_of("/".join(parts[2:4]))
            elif len(parts) > 4 and parts[2] == "resolve":
                self._give("/".join(parts[:2]), "/".join(parts[4:]))
            else:
                self._refuse("EntryNotFound")

        def _tell_of(self, repository: str) -> None:
            """What the hub's page of a model is made of."""
            if not (folder / repository).is_dir():
                return self._refuse("RepoNotFound")
            files = [{"rfilename": path.name} for path in sorted((folder / repository).iterdir())]
            told = {"id": repository, "modelId": repository, "sha": _COMMIT, "siblings": files, "tags": []}
            return self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

        def _give(self, repository: str, name: str) -> None:
            if not (folder / repository).is_dir():
                return self._refuse("RepoNotFound")
            path = folder / repository / name
            if not path.is_file():
                return self._refuse("EntryNotFound", {"X-Repo-Commit": _COMMIT})
            content = path.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            return self._send(200, content, {"X-Repo-Commit": _COMMIT, "ETag": f'"{tag}"'})

        def _refuse(self, code: str, headers: dict[str, str] | None = None) -> None:
            self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: what is asked is no news."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
