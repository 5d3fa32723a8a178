"""What `ray status --verbose` says of an autoscaling cluster, as data."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_AMOUNT = re.compile(r"\s+([\d.]+)/([\d.]+) (\w+)(?: \(.*\))?")  # all but memory, which has units
_REQUEST = re.compile(r"(\{[^}]*\})(?:: | \* )(\d+)")
_LAUNCHING = re.compile(r" \S+, (\d+) launching")


@dataclass(slots=True)
class Use:
    """Of each resource, how much is in use and how much there is."""

    used: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class NodeUse(Use):
    """A node that is up; `name` is the autoscaler's."""

    name: str = ""
    id: str = ""
    is_idle: bool = False


@dataclass(slots=True)
class AutoscalerStatus:
    """Nodes that are up, how many more are coming, what is in use and what is asked for."""

    nodes: list[NodeUse] = field(default_factory=list)
    pending: int = 0
    use: Use = field(default_factory=Use)
    requested: list[tuple[dict[str, float], int]] = field(default_factory=list)


def parse_status(text: str) -> AutoscalerStatus:
    """
    Raises:
        ValueError: it is not what `ray status --verbose` prints of a cluster with an autoscaler.
    """
    if "\nNode status\n" not in text:
        raise ValueError(f"want a report of Ray's autoscaler, got {text[:200]!r}")
    status = AutoscalerStatus()
    for section, line in _sections(text):
        if section.startswith("Node: "):
            _add_to_node(status.nodes, section, line)
        elif section == "Pending:" and line.strip() != "(no pending nodes)":
            launching = _LAUNCHING.fullmatch(line)
            status.pending += int(launching[1]) if launching else 1
        elif section == "Total Usage:":
            _add_amount(status.use, line)
        elif section in ("From request_resources:", "Pending Demands:"):
            status.requested += [(ast.literal_eval(bundle), int(count)) for bundle, count in _REQUEST.findall(line)]
    return status


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the last title above it, which is not indented."""
    section = ""
    for line in text.splitlines():
        if line.startswith(" "):
            yield section, line
        elif line.endswith(":") or line.startswith("Node: "):
            section = line


def _add_to_node(nodes: list[NodeUse], section: str, line: str) -> None:
    key, _, value = line.strip().partition(": ")
    if key == "Id":
        nodes.append(NodeUse(name=section.removeprefix("Node: ").split(" (")[0], id=value))
    elif key == "Idle":
        nodes[-1].is_idle = True
    else:
        _add_amount(nodes[-1], line)


def _add_amount(use: Use, line: str) -> None:
    if amount := _AMOUNT.fullmatch(line):
        use.used[amount[3]], use.total[amount[3]] = float(amount[1]), float(amount[2])
