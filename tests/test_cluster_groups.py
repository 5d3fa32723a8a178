"""A job's request starts nodes of the group that it names: the cluster files under Ray's autoscaler v2."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ClusterResourceConstraint, GangResourceRequest
from ray.train._internal.autoscaling_coordinator_client import build_train_resource_request

from tiny import experiment
from tokendrop.launch.trainer import _trainer
from tokendrop.launch.worker_spec import WorkerSpec

CLUSTER = Path(__file__).parents[1] / "cluster"
FILES = ["ray_up/aws", "ray_up/gcp", "kuberay/raycluster"]
ACCELERATORS, MARKETS = ("A100", "H100", "H200"), ("spot", "on_demand")
BY_PLAN = {"segments": [{"from": "0%", "workers": 16}]}
MODES = {"fixed": {}, "fit_per_segment": BY_PLAN, "schedule": BY_PLAN}


def node_types(file: str) -> dict[str, Any]:
    """As Ray's autoscaler reads them."""
    read = [*yaml.safe_load_all((CLUSTER / f"{file}.yaml").read_text())][-1]
    if read.get("kind") == "RayCluster":
        read["metadata"]["namespace"] = "default"
        read = _derive_autoscaling_config_from_ray_cr(read)
    return AutoscalingConfig(prepare_config(read), skip_content_hash=True).get_node_type_configs()


def bundles(folder: Path, mode: str, **scaling: Any) -> list[dict[str, float]]:
    """What Ray Train asks for: of its autoscaler beforehand, and then as the placement group of its workers."""
    config = experiment(
        train__global_batch=64,
        scaling={"workers": 16, "cpus_per_worker": 8, "gpus_per_worker": 1, "mode": mode, **MODES[mode], **scaling},
    )
    trainer = _trainer(WorkerSpec(config=config, run=folder, data=folder), 0, max_restarts=0)
    asks: Any = getattr(trainer, "policy", trainer)
    return build_train_resource_request(asks.scaling_config, 16)[0]


def started(types: dict[str, Any], each: list[dict[str, float]], **known: Any) -> dict[str, int]:
    """Nodes that the autoscaler starts for a placement group, and by itself where it is asked beforehand: the same."""
    requests = [ResourceRequestUtil.make(one) for one in each]
    ways = (
        {"gang_resource_requests": [GangResourceRequest(requests=requests)]},
        {
            "cluster_resource_constraints": [
                ClusterResourceConstraint(resource_requests=ResourceRequestUtil.group_by_count(requests))
            ]
        },
        {"resource_requests": ResourceRequestUtil.group_by_count(requests)},
    )
    found = []
    for way in ways:
        scheduler = ResourceDemandScheduler(AutoscalerEventLogger(_Silent()))
        request = SchedulingRequest(disable_launch_config_check=True, node_type_configs=types, **way, **known)
        reply = scheduler.schedule(request)
        found.append(
            {one.instance_type: one.count for one in reply.to_launch if not one.instance_type.startswith("head")}
        )
    assert found[0] == found[1] == found[2]
    return found[0]


class _Silent:
    """Takes the events of the scheduler."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


@pytest.fixture(params=FILES)
def types(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("tokendrop.elastic.policy.is_autoscaler_v2", lambda **_: True)  # which a head would tell
    return node_types(request.param)


@pytest.mark.parametrize("mode", MODES)
def test_workers_come_on_nodes_of_the_group_that_the_job_names(tmp_path: Path, types: dict[str, Any], mode: str):
    for accelerator, market in product(ACCELERATORS, MARKETS):
        group = f"{accelerator.lower()}-{market.replace('_', '-')}"
        assert started(types, bundles(tmp_path, mode, accelerator=accelerator, market=market)) == {group: 2}


def test_spot_nodes_come_first_and_others_where_these_are_all_up_or_were_waited_for_in_vain(
    tmp_path: Path, types: dict[str, Any]
):
    for accelerator in ACCELERATORS:
        spot, other = f"{accelerator.lower()}-spot", f"{accelerator.lower()}-on-demand"
        is_out = {"recoverable_resource_availabilities": {spot: 0.0}}
        either = bundles(tmp_path, "fixed", accelerator=accelerator)
        assert started(types, either) == {spot: 2}
        assert started(types, either * 5) == {spot: 8, other: 2}
        assert started(types, either, **is_out) == {other: 2}
        assert started(types, bundles(tmp_path, "fixed", accelerator=accelerator, market="spot"), **is_out) == {spot: 2}


def test_a_job_that_names_nothing_gets_the_paper_s_spot_nodes_and_preparation_gets_no_gpu(
    tmp_path: Path, types: dict[str, Any]
):
    assert started(types, bundles(tmp_path, "fixed")) == {"a100-spot": 2}
    assert started(types, [{"CPU": 1.0}] * 4) == {"cpu": 1}


def test_what_no_group_has_starts_nothing(tmp_path: Path, types: dict[str, Any]):
    assert started(types, bundles(tmp_path, "fixed", accelerator="B200")) == {}


@pytest.mark.parametrize(("file", "column", "key"), [("aws", 4, "InstanceType"), ("gcp", 5, "machineType")])
def test_the_readme_s_table_is_that_of_the_files(file: str, column: int, key: str):
    rows = [line.split("|") for line in (CLUSTER / "README.md").read_text().splitlines() if line.startswith("| `")]
    told = {
        group: row[column].strip() for row in rows for group in re.findall(r"`([a-z]\S*)`", row[1].partition(":")[0])
    }
    groups = yaml.safe_load((CLUSTER / "ray_up" / f"{file}.yaml").read_text())["available_node_types"]
    machines = {name: group["node_config"][key] for name, group in groups.items() if name != "head"}
    assert {group: told[group] for group in machines} == machines
