"""Our dashboards as Grafana reads them."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "dashboards"
NAMES = ("data", "scaling", "sweep", "training")


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def panels(name: str) -> list[dict[str, Any]]:
    """Without rows."""
    return [panel for panel in read(name)["panels"] if panel["type"] != "row"]


def queries(name: str) -> list[tuple[str, str]]:
    """Where each query of a panel stands, and the query."""
    return [
        (f"{name}: {panel['title']} {target['refId']}", target["expr"])
        for panel in panels(name)
        for target in panel["targets"]
    ]


def marks(name: str) -> list[tuple[str, str]]:
    """The same of what is marked in all panels."""
    return [(f"{name}: {one['name']}", one["expr"]) for one in read(name).get("annotations", {}).get("list", [])]


def filled(query: str, *, run: str = ".*", sweep: str = ".*") -> str:
    """A query with Grafana's variables replaced."""
    values = {"$run": run, "$sweep": sweep, "$__rate_interval": "1m"}
    for name, value in values.items():
        query = query.replace(name, value)
    return query
