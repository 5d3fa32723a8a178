"""The cluster files: what Ray, a cloud and Kubernetes would say of them, as far as that can be known without one."""

import copy
import gzip
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.providers import _get_node_provider
from ray.autoscaler._private.util import prepare_config, validate_config

from tokendrop.config.load import load_job

ROOT = Path(__file__).parents[1]
RAY_UP = sorted((ROOT / "cluster" / "ray_up").glob("*.yaml"))
KUBERAY = ROOT / "cluster" / "kuberay"
DOCKERFILE = (ROOT / "cluster" / "images" / "Dockerfile").read_text()
PINS = dict(
    line.split("==")
    for name in ("newest.txt", "pins.txt")
    for line in (ROOT / ".ci" / name).read_text().splitlines()
    if "==" in line
)
CRDS = Path(__file__).parent / "kuberay"
GROUPS = {f"{gpu}-{market}" for gpu in ("a100", "h100", "h200") for market in ("spot", "on-demand")} | {"cpu"}

Yaml = dict[str, Any]


def read(path: Path) -> Yaml:
    return yaml.safe_load(path.read_text())


def manifests() -> list[Yaml]:
    return [one for path in sorted(KUBERAY.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]


def manifest(kind: str) -> Yaml:
    (found,) = (one for one in manifests() if one["kind"] == kind)
    return found


def pod_templates() -> dict[str, Yaml]:
    spec = manifest("RayCluster")["spec"]
    return {
        "head": spec["headGroupSpec"]["template"]["spec"],
        **{group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]},
    }


def submitted_jobs() -> set[str]:
    """Jobs that the README or a manifest sends to a cluster of machines."""
    guide = (ROOT / "cluster" / "README.md").read_text()
    commands = [*guide.splitlines(), manifest("RayJob")["spec"]["entrypoint"]]
    return {job for command in commands for job in re.findall(r"jobs/paper/\S+\.yaml", command)}


def kinds_of(resources: Yaml) -> dict[str, str]:
    """By the names of the job's keys: `accelerator_type` and `market`."""
    return dict(name.split(":") for name in resources if ":" in name)


def kinds_named(group: str) -> dict[str, str]:
    """`h100-on-demand` has H100s that nobody takes back; the head and `cpu` are of no kind."""
    accelerator, _, market = group.partition("-")
    return {"accelerator_type": accelerator.upper(), "market": market.replace("-", "_")} if market else {}


def workers_that_fit(node: dict[str, float], nodes: int, job: str) -> int:
    scaling = load_job(ROOT / job, []).scaling
    by_gpu = node["GPU"] // scaling.gpus_per_worker if scaling.gpus_per_worker else nodes
    return nodes * int(min(node["CPU"] // scaling.cpus_per_worker, by_gpu))


# ray up


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
def test_ray_takes_the_file_as_it_is(path: Path):
    config = read(path)
    validate_config(prepare_config(copy.deepcopy(config)))
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config({**config, "idle_timeout": 5}))


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
def test_machines_are_of_the_market_that_their_group_names_and_none_waits_for_a_job(path: Path):
    config = prepare_config(read(path))
    nodes = config["available_node_types"]
    head = nodes.pop(config["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    assert not is_spot(head["node_config"])
    assert nodes.keys() == GROUPS
    for name, node in nodes.items():
        assert is_spot(node["node_config"]) == (not name.endswith("-on-demand"))
        assert node["min_workers"] == 0 < node["max_workers"] <= config["max_workers"]
        assert kinds_of(node["resources"]) == kinds_named(name)
    assert 0 < config["idle_timeout_minutes"] <= 15
    assert any("mlflow server" in command for command in config["head_start_ray_commands"])
    assert "--volume=/data:/data" in config["docker"]["run_options"]
    assert any(re.search(r"mount --types nfs.* /data ", command) for command in config["initialization_commands"])


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
def test_machines_let_nobody_in_without_the_token(path: Path):
    config = read(path)
    starts = [
        line for where in ("head", "worker") for line in config[f"{where}_start_ray_commands"] if "ray start" in line
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token ray start" in line for line in starts)
    assert ["--dashboard-host=127.0.0.1" in line for line in starts] == ["--head" in line for line in starts]
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}


def test_pods_let_nobody_in_without_the_token_nor_from_outside():
    spec = manifest("RayCluster")["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert "enableIngress" not in spec["headGroupSpec"]
    assert {one["kind"] for one in manifests()} == {"PersistentVolumeClaim", "RayCluster", "RayJob"}


def is_spot(machine: Yaml) -> bool:
    market = machine.get("InstanceMarketOptions", {}).get("MarketType")
    return market == "spot" or machine.get("scheduling", {}).get("provisioningModel") == "SPOT"


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.stem)
def test_the_jobs_that_the_readme_submits_fit_the_machines(path: Path):
    assert submitted_jobs()
    gpu = read(path)["available_node_types"]["a100-spot"]
    for job in submitted_jobs():
        assert workers_that_fit(gpu["resources"], gpu["max_workers"], job) >= load_job(ROOT / job, []).scaling.workers


def test_ec2_starts_the_machines_that_ray_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    moto = pytest.importorskip("moto")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray leaves a key there
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    config = prepare_config(read(ROOT / "cluster" / "ray_up" / "aws.yaml"))
    # Ray would make one, and wait 15 s for it
    config["available_node_types"]["head"]["node_config"]["IamInstanceProfile"] = {"Name": "ray"}
    with moto.mock_aws():
        import boto3
        from ray.autoscaler._private.aws.config import bootstrap_aws

        boto3.client("iam").create_instance_profile(InstanceProfileName="ray")
        config = bootstrap_aws(config)
        provider = _get_node_provider(config["provider"], config["cluster_name"])
        for name, node in config["available_node_types"].items():
            provider.create_node(node["node_config"], {"ray-node-name": name}, 1)
        started = {(one.instance_type, one.instance_lifecycle) for one in provider.ec2.instances.all()}
    with_gpus = {
        (machine, market) for machine in ("p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge") for market in (None, "spot")
    }
    assert started == {("m7i.2xlarge", None), ("m7i.4xlarge", "spot")} | with_gpus


# Kubernetes


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob"])
def test_kuberay_takes_the_manifest(kind: str):
    """Against KubeRay's own definitions, refusing unknown fields, as `kubectl apply` does."""
    schema = strict(json.loads(gzip.decompress((CRDS / f"{kind.lower()}s.json.gz").read_bytes())))
    jsonschema.validate(manifest(kind), schema)
    wrong = manifest(kind)
    wrong["spec"]["rayVersio"] = "2"
    with pytest.raises(jsonschema.ValidationError, match="rayVersio"):
        jsonschema.validate(wrong, schema)


def strict(schema: Any) -> Any:
    """Kubernetes' dialect as JSON Schema: no unknown fields, whole numbers where it says int-or-string."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        out.setdefault("additionalProperties", schema.get("x-kubernetes-preserve-unknown-fields", False))
    return out


def test_pods_come_by_the_autoscaler_alone_and_share_one_volume():
    spec, volume = manifest("RayCluster")["spec"], manifest("PersistentVolumeClaim")
    assert manifest("RayJob")["spec"]["clusterSelector"] == {
        "ray.io/cluster": manifest("RayCluster")["metadata"]["name"]
    }
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert [(group["replicas"], group["minReplicas"]) for group in spec["workerGroupSpecs"]] == [(0, 0)] * 7
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pod_templates().values():
        claims = [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert claims == [volume["metadata"]["name"]]
        assert all({"name": "data", "mountPath": "/data"} in one["volumeMounts"] for one in pod["containers"])
        # with limits other than requests Ray would count what the pod may not get
        assert all(one["resources"]["requests"] == one["resources"]["limits"] for one in pod["containers"][:1])


def test_pods_land_on_the_nodes_of_their_group():
    groups = {one["groupName"]: one for one in manifest("RayCluster")["spec"]["workerGroupSpecs"]}
    assert groups.keys() == GROUPS
    for name, pod in pod_templates().items():
        kinds, resources = kinds_named(name), pod["containers"][0]["resources"]["limits"]
        assert kinds_of(groups.get(name, {}).get("resources", {})) == kinds
        assert pod.get("nodeSelector", {}) == {key.removesuffix("_type"): kind for key, kind in kinds.items()}
        tolerated = {one["key"] for one in pod.get("tolerations", [])}
        assert ("nvidia.com/gpu" in resources) == ("nvidia.com/gpu" in tolerated) == bool(kinds)
        assert ("cloud.google.com/gke-spot" in tolerated) == (name in GROUPS and not name.endswith("-on-demand"))


def test_no_pod_runs_as_root_and_each_container_is_asked_whether_it_is_well():
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert DOCKERFILE.rindex("USER ") > DOCKERFILE.rindex("RUN ")
    for pod in pod_templates().values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == int(user) > 0
        assert not any("securityContext" in one for one in pod["containers"])
        # Ray's container comes first, and KubeRay adds probes to it alone, where it has none
        assert ["livenessProbe" in one for one in pod["containers"]] == [at > 0 for at in range(len(pod["containers"]))]
    assert re.search(r"^HEALTHCHECK .*CMD wget .*127\.0\.0\.1:52365/api/healthz", DOCKERFILE, re.MULTILINE)


def test_the_jobs_that_are_submitted_fit_the_pods():
    gpu = manifest("RayCluster")["spec"]["workerGroupSpecs"][0]
    limits = pod_templates()[gpu["groupName"]]["containers"][0]["resources"]["limits"]
    pod = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
    for job in submitted_jobs():
        assert workers_that_fit(pod, gpu["maxReplicas"], job) >= load_job(ROOT / job, []).scaling.workers


def test_the_job_of_the_manifest_can_be_planned():
    words = manifest("RayJob")["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "jobs/run.py", "train"]
    config = load_job(ROOT / words[3], words[4:])
    assert config.runs_folder.startswith("/data/")
    assert config.data.folder.startswith("/data/")
    assert set(yaml.safe_load(manifest("RayJob")["spec"]["runtimeEnvYAML"])) == {"working_dir", "env_vars"}


# The image


def images() -> set[str]:
    used = {read(path)["docker"]["image"] for path in RAY_UP}
    return used | {one["image"] for pod in pod_templates().values() for one in pod["containers"]}


def test_one_image_everywhere_named_by_the_versions_that_are_tested():
    (image,) = images()
    (built,) = re.findall(r"docker build .* -t (\S+)", DOCKERFILE)
    ray, torch, python = re.fullmatch(r".*:ray(.*)-torch(.*)-py(\d+)@sha256:DIGEST", image).groups()
    assert f"{built}@sha256:DIGEST" == image
    assert built in (ROOT / "cluster" / "README.md").read_text()
    assert (ray, torch) == (PINS["ray"], PINS["torch"])
    assert f"\nARG BASE=rayproject/ray:{ray}-py{python}-cpu\nFROM ${{BASE}}\n" in DOCKERFILE
    assert manifest("RayCluster")["spec"]["rayVersion"] == ray
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert re.fullmatch(r">=3\.(\d+),<3\.(\d+)", wanted)
    low, high = (int(minor) for minor in re.findall(r"3\.(\d+)", wanted))
    assert low <= int(python.removeprefix("3")) < high


def test_the_image_takes_its_packages_from_the_package():
    """The line that the image runs prints all requirements of the platform, evaluation, images, DeepSpeed and fp8."""
    (script,) = re.findall(r'python -c "(.*?)" >', DOCKERFILE, re.DOTALL)
    script = script.replace("\\\n", "\n").replace("/tmp/pyproject.toml", str(ROOT / "pyproject.toml"))
    printed: list[str] = []
    exec(" ".join(script.split("\n")), {"print": lambda *lines, sep: printed.extend(lines)})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = ("platform", "eval", "vision", "deepspeed", "fp8")
    wanted = [*project["dependencies"], *(one for name in used for one in extras[name])]
    assert printed == [one for one in wanted if not one.startswith("tokendrop")]
    assert "COPY pyproject.toml .ci/newest.txt .ci/pins.txt /tmp/" in DOCKERFILE
    assert "pip install --no-cache-dir -r /tmp/requirements.txt -c /tmp/newest.txt" in DOCKERFILE
