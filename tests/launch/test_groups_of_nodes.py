"""On a cluster with the groups of `cluster/ray_up/aws.yaml`, workers come on nodes of the group that a job names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from corpora import documents, tiny_job, write_corpus
from kills import Command
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.launch import local_head
from tokendrop.launch.local_cluster import start, stop
from tokendrop.launch.local_head import ClusterSize, LocalCluster

ROOT = Path(__file__).parents[2]
AWS = ROOT / "cluster" / "ray_up" / "aws.yaml"
MOST_S = 120
BY_PLAN = ("scaling.mode=schedule", "scaling.segments=[{from: 0%, workers: 1}]", f"scaling.patience_s={MOST_S}")


def with_groups_of_aws(autoscaling: dict[str, Any]) -> dict[str, Any]:
    """Nodes of a local cluster that have one core each, and the GPUs and kinds of the machines of a group."""
    types = autoscaling["available_node_types"]
    node = types.pop("node")
    for name, group in yaml.safe_load(AWS.read_text())["available_node_types"].items():
        if name != "head":
            types[name] = group | node | {"resources": group["resources"] | node["resources"], "node_config": {}}
    return autoscaling


@pytest.fixture
def cluster(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    of_one_kind = local_head._autoscaling
    monkeypatch.setattr(local_head, "_autoscaling", lambda cluster: with_groups_of_aws(of_one_kind(cluster)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "platform"))  # of the autoscaler, which starts the nodes
    size = ClusterSize(min_nodes=0, max_nodes=2, cpus_per_node=1, gpus_per_node=0, idle_timeout_s=MOST_S)
    try:
        yield start(size)
    finally:
        stop()


@pytest.mark.chaos
@pytest.mark.ray
@pytest.mark.schedule
def test_workers_come_on_nodes_of_the_group_that_their_job_names(
    tmp_path: Path, ray_cluster: None, cluster: LocalCluster, environment: dict[str, str]
) -> None:
    job = tiny_job(tmp_path, [write_corpus(tmp_path / "corpus.jsonl", documents(60))])
    prepare(load_job(job))
    mine = environment | cluster.environment
    h100 = ("scaling.accelerator=H100", "scaling.market=on_demand", *BY_PLAN)
    a100 = ("scaling.accelerator=A100", "scaling.market=spot")
    with (
        Command("train", job, *h100, environment=mine) as by_plan,
        Command("train", job, *a100, environment=mine) as fixed,
    ):
        by_plan.finish(patience_s=MOST_S)
        fixed.finish(patience_s=MOST_S)
        assert "start    1 worker of 1 CPU (H100, on_demand) each\n" in by_plan.said()
    (log,) = Path(cluster.folder).glob("session_2*/logs/monitor.log")
    started = re.findall(r"Adding (\d+) node\(s\) of type (\S+)\.", log.read_text())
    assert sorted(started) == [("1", "a100-spot"), ("1", "h100-on-demand")]
