"""`tokendrop cluster`: a Ray cluster on this machine that grows and shrinks by itself."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokendrop.cli.command import Command, Group, Outcome, fail, no_arguments
from tokendrop.output import table


def up_arguments(parser: argparse.ArgumentParser) -> None:
    """How large it may get, and where it listens."""
    parser.add_argument("--nodes", default="0..4", metavar="N..M", help="at least N nodes, at most M (default 0..4)")
    parser.add_argument("--cpus-per-node", type=int, default=2, metavar="N", help="what a node counts (default 2)")
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="pretended GPUs (default 0)")
    parser.add_argument(
        "--idle-timeout", type=float, default=10, metavar="S", help="an idle node goes after S seconds (default 10)"
    )
    parser.add_argument("--port", type=int, help="of RAY_ADDRESS (default 6399, or any that is free)")


def up(options: argparse.Namespace) -> Outcome:
    """Start it.

    Raises:
        UserError: a size is wrong, or one is up already.
    """
    from tokendrop.launch.local_cluster import start
    from tokendrop.launch.local_head import ClusterSize

    size = ClusterSize.parse(
        options.nodes,
        cpus_per_node=options.cpus_per_node,
        gpus_per_node=options.gpus_per_node,
        idle_timeout_s=options.idle_timeout,
    )
    with _failing_by_name():
        cluster = start(size, port=options.port)
    result = {"address": cluster.address, "dashboard": cluster.dashboard, "environment": cluster.environment}
    return Outcome(result, addresses_text(cluster.dashboard, cluster.environment))


def status(options: argparse.Namespace) -> Outcome:
    """Look at its nodes."""
    from tokendrop.launch.local_cluster import find
    from tokendrop.launch.local_head import describe

    with _failing_by_name():
        cluster = find()
        if cluster is None:
            return Outcome({"up": False}, "no local cluster is up; 'tokendrop cluster up' starts one")
        found = describe(cluster)
    return Outcome({"up": True, **found}, cluster_text(found))


def down(options: argparse.Namespace) -> Outcome:
    """Stop it, where one is up."""
    from tokendrop.launch.local_cluster import stop

    with _failing_by_name():
        stopped = stop()
    if stopped is None:
        return Outcome({"stopped": None}, "no local cluster was up")
    return Outcome({"stopped": stopped.address}, f"stopped {stopped.address}")


@contextmanager
def _failing_by_name() -> Iterator[None]:
    """What a cluster says when it fails ends the command with exit code 1."""
    from tokendrop.launch.local_head import ClusterError

    try:
        yield
    except ClusterError as error:
        fail(str(error))


def cluster_text(status: Mapping[str, Any]) -> str:
    """A local cluster: its nodes, what they have in use, what is asked of it."""

    def share(of: Mapping[str, Any]) -> list[str]:
        return [f"{of['used'].get(name, 0):g}/{of['resources'].get(name, 0):g}" for name in ("CPU", "GPU")]

    rows = [[node["role"], node["state"], *share(node)] for node in status["nodes"]]
    rows += [["worker", "pending", "", ""]] * status["pending"]
    rows.append(["all", "", *share(status)])
    requested = [
        f"{request['count']} x {', '.join(f'{amount:g} {name}' for name, amount in request['resources'].items())}"
        for request in status["requested"]
    ]
    return "\n".join(
        [
            table(["node", "state", "CPUs used", "GPUs used"], rows),
            "",
            f"requested  {'; '.join(requested) or 'nothing more'}",
            addresses_text(status["dashboard"], status["environment"]),
        ]
    )


def addresses_text(dashboard: str, environment: Mapping[str, str]) -> str:
    """How to reach a local cluster, and how to log in to its dashboard."""
    lines = [f"dashboard  {dashboard}"]
    if token := environment.get("RAY_AUTH_TOKEN_PATH"):
        lines.append(f"log in     with the token that 'cat {token}' prints; the page asks for it once")
    return "\n".join([*lines, f"export {' '.join(f'{name}={value}' for name, value in environment.items())}"])


GROUP = Group(
    "cluster",
    "A Ray cluster on this machine that grows and shrinks by itself, for trying things.",
    (
        Command(
            "cluster up",
            up,
            up_arguments,
            about="Start a head without CPUs and nodes as they are needed; prints how to reach it.",
            example="tokendrop cluster up --nodes 1..4 --gpus-per-node 1",
        ),
        Command(
            "cluster status",
            status,
            no_arguments,
            about="Print its nodes, what they have in use and what is requested.",
            example="tokendrop cluster status --json",
        ),
        Command(
            "cluster down",
            down,
            no_arguments,
            about="Stop it, and every process that runs on it.",
            example="tokendrop cluster down",
        ),
    ),
)
