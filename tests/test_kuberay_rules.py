"""The manifests by KubeRay's own rules: those of `ValidateRayJobSpec` and `ValidateRayClusterSpec` in KubeRay 1.7.

They are in ray-operator/controllers/ray/utils/validation.go; its definitions, as in test_cluster.py, don't say them.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERAY = Path(__file__).parents[1] / "cluster" / "kuberay"
Yaml = dict[str, Any]


def spec_of(name: str) -> Yaml:
    return list(yaml.safe_load_all((KUBERAY / f"{name}.yaml").read_text()))[-1]["spec"]


def job_faults(spec: Yaml) -> Iterator[str]:
    """What `ValidateRayJobSpec` refuses, as far as our manifests use it."""
    selects, retries = bool(spec.get("clusterSelector")), spec.get("backoffLimit") or 0
    mode = spec.get("submissionMode", "K8sJobMode")
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield "suspend"
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield "ttlSecondsAfterFinished"
    if selects and spec.get("suspend"):
        yield "clusterSelector with suspend"
    if not selects and "rayClusterSpec" not in spec:
        yield "neither rayClusterSpec nor clusterSelector"
    if selects and not spec["clusterSelector"].get("ray.io/cluster"):
        yield "clusterSelector without a name"
    if selects and mode == "SidecarMode":
        yield "clusterSelector in SidecarMode"
    if selects and retries > 0:  # by PR 4527; before, the selected cluster was deleted
        yield "clusterSelector with backoffLimit"
    if mode == "InteractiveMode" and retries > 0:
        yield "InteractiveMode with backoffLimit"
    if retries < 0 or any(spec.get(key, 1) <= 0 for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds")):
        yield "a number"
    if not isinstance(yaml.safe_load(spec.get("runtimeEnvYAML", "{}")), dict):
        yield "runtimeEnvYAML"


def cluster_faults(spec: Yaml) -> Iterator[str]:
    """What `ValidateRayClusterSpec` refuses, as far as our manifests use it."""
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    version = tuple(map(int, spec["rayVersion"].split("."))) if spec.get("rayVersion") else (0,)
    for group in groups:
        given = group["rayStartParams"].keys()
        if group.get("resources") and given & {"num-cpus", "num-gpus", "memory", "resources"}:
            yield "resources in two places"
        if "labels" in given:
            yield "labels in rayStartParams"
        pod = group["template"]["spec"]
        if not pod["containers"]:
            yield "no container"
        if spec["autoscalerOptions"].get("version") == "v2" and pod.get("restartPolicy", "Never") != "Never":
            yield "restartPolicy with autoscaler v2"
    for group in spec["workerGroupSpecs"]:
        if not 0 <= group["minReplicas"] <= group["maxReplicas"] or group.get("suspend"):
            yield "replicas"
        if group.get("priority") and (version < (2, 56, 0) or spec["autoscalerOptions"].get("version") != "v2"):
            yield "priority without Ray 2.56 and autoscaler v2"
    environment = groups[0]["template"]["spec"]["containers"][0].get("env", [])
    if {"RAY_enable_autoscaler_v2", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"} & {one["name"] for one in environment}:
        yield "the head's environment"
    if spec["autoscalerOptions"].get("idleTimeoutSeconds", 0) < 0:
        yield "idleTimeoutSeconds"
    if spec.get("authOptions", {}).get("mode") == "token" and version < (2, 52, 0):
        yield "token without Ray 2.52"


def test_kubernetes_takes_the_manifests() -> None:
    assert list(job_faults(spec_of("rayjob"))) == []
    assert list(cluster_faults(spec_of("raycluster"))) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"backoffLimit": 5}, "clusterSelector with backoffLimit"),
        ({"clusterSelector": {}}, "neither rayClusterSpec nor clusterSelector"),
        ({"clusterSelector": {"name": "x"}}, "clusterSelector without a name"),
        ({"submissionMode": "SidecarMode"}, "clusterSelector in SidecarMode"),
        ({"runtimeEnvYAML": "working_dir"}, "runtimeEnvYAML"),
    ],
)
def test_what_kuberay_refuses_would_be_found(change: Yaml, fault: str) -> None:
    assert fault in list(job_faults({**spec_of("rayjob"), **change}))


def test_what_kuberay_refuses_of_a_cluster_would_be_found() -> None:
    spec = spec_of("raycluster")
    wrong = copy.deepcopy(spec)
    wrong["workerGroupSpecs"][0]["template"]["spec"]["restartPolicy"] = "Always"
    assert "restartPolicy with autoscaler v2" in list(cluster_faults(wrong))
    assert "token without Ray 2.52" in list(cluster_faults({**spec, "rayVersion": "2.51.0"}))
    assert "priority without Ray 2.56 and autoscaler v2" in list(cluster_faults({**spec, "rayVersion": "2.55.0"}))
    wrong["workerGroupSpecs"][0]["rayStartParams"] = {"num-cpus": "88"}
    assert "resources in two places" in list(cluster_faults(wrong))


def test_a_lost_head_has_the_job_submitted_again() -> None:
    """By the Kubernetes job of the submitter, which asks first whether the cluster knows the job."""
    assert spec_of("rayjob")["submitterConfig"]["backoffLimit"] > 0


def test_a_pod_that_is_told_to_end_has_time_to_drain() -> None:
    for group in spec_of("raycluster")["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        drain_s = {one["name"]: one["value"] for one in container["env"]}["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert 0 < float(drain_s) < pod["terminationGracePeriodSeconds"]
