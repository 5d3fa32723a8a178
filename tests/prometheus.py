"""A real Prometheus, as a process of its own, and its answers."""

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from checkouts import free_ports

Points = list[tuple[float, float]]


class Prometheus:
    """One that answers at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.address, self.begun = f"http://127.0.0.1:{port}", time.time()

    def since_it_began(self, query: str, *, every_s: int = 2) -> list[tuple[dict[str, str], Points]]:
        """Tags and points of each series that answers a query, from the start of this Prometheus to now."""
        asked = {"query": query, "start": self.begun, "end": time.time(), "step": every_s}
        found = self._get(f"api/v1/query_range?{urllib.parse.urlencode(asked)}")["data"]["result"]
        return [(one["metric"], [(when, float(value)) for when, value in one["values"]]) for one in found]

    def wait(self) -> None:
        """Until it is ready."""
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{self.address}/-/ready", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("Prometheus is not ready")

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def scraping(command: str, folder: Path, targets: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that asks these targets every second, while the block runs."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": [*targets]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    options = {
        "config.file": folder / "prometheus.yaml",
        "storage.tsdb.path": folder / "stored",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([command, *(f"--{key}={value}" for key, value in options.items())], stderr=log)
    try:
        found = Prometheus(port)
        found.wait()
        yield found
    finally:
        process.terminate()
        process.wait(30)
