"""Of Ray, only what it documents, outside of two files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform" / "tokendrop"
# their contract test holds the private names of Ray that they use
SEAMS = [PACKAGE / "elastic" / name for name in ("policy.py", "standby.py")]

# variables that Ray reads: where it tells of them
DOCUMENTED = {
    "RAY_ADDRESS": "ray.init",
    "RAY_AIR_NEW_OUTPUT": "ray.tune.RunConfig, verbose",
    "RAY_API_SERVER_ADDRESS": "Ray Jobs CLI API reference",
    "RAY_AUTH_MODE": "Ray token authentication",
    "RAY_AUTH_TOKEN": "Ray token authentication",
    "RAY_AUTH_TOKEN_PATH": "Ray token authentication",
    "RAY_CHDIR_TO_TRIAL_DIR": "ray.tune.Trainable",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "Ray Clusters overview; here it keeps other machines out",
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "the error of ray.init that it answers",
    "RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "Environment dependencies, working_dir",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "the dashboard's answer, where it knows of no run of Ray Train",
    "RAY_TMPDIR": "Ray on Spark; the folder of ray.init, which has no public argument for it",
    "RAY_USAGE_STATS_ENABLED": "Usage stats collection",
    "RAY_USE_TLS": "TLS authentication",
    "RAY_enable_autoscaler_v2": "KubeRay autoscaling",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "GCS fault tolerance in KubeRay",
}
# those that it does not tell of, and why there is no other way
NEEDED = {
    "RAY_CLOUD_INSTANCE_ID": "KubeRay subsets it: all by which the autoscaler knows which node is which",
    "RAY_NODE_TYPE_NAME": "KubeRay subsets it: all by which the autoscaler knows of which type a node is",
    "RAY_JOB_STOP_SIGNAL": "`serve run` subsets it: Ray blocks SIGINT in jobs without it",
    "RAY_JOB_STOP_WAIT_TIME_S": "`serve run` subsets it: a job that is stopped has 3 s without it",
}
# attributes of Ray's objects that are not public, and why there is no other way
ATTRIBUTES = {"_do_request": "of JobSubmissionClient: nothing public says whether a head is on this machine"}


def files() -> list[Path]:
    return [path for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "jobs").rglob("*.py")]) if path not in SEAMS]


def trees() -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in files()]


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of Ray that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "ray")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that a file takes from others than itself, and gives to what it calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in OWN):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


OWN = {"self", "cls", "os", "atexit"}
DEFINED = {
    name
    for _, tree in trees()
    for node in ast.walk(tree)
    for name in (
        [node.name]
        if isinstance(node, ast.FunctionDef)
        else [node.attr]
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        else []
    )
}


def is_private(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith("_") for part in parts) or parts[1:3] in (["train", "v2"], ["autoscaler", "v2"])


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from ray._raylet import setproctitle", True),
        ("from ray import _private", True),
        ("def late():\n    import ray.data._internal.stats", True),
        ("from ray.train.v2.api.exceptions import ControllerError", True),
        ("from ray.autoscaler import v2", True),
        ("from ray.autoscaler.node_provider import NodeProvider", False),
        ("from ray.train import ControllerError", False),
    ],
)
def test_private_imports_are_found(code: str, found: bool) -> None:
    assert any(map(is_private, imported(ast.parse(code)))) == found


def test_no_private_part_of_ray_is_imported() -> None:
    assert {(file, name) for file, tree in trees() for name in imported(tree) if is_private(name)} == set()


def test_no_private_attribute_or_argument_of_ray_is_used() -> None:
    used = {
        (file, name)
        for file, tree in trees()
        if any(imported(tree))
        for name in private_attributes(tree)
        if name.startswith("_") and not name.startswith("__") and name not in DEFINED
    }
    assert {(file, name) for file, name in used if name not in ATTRIBUTES} == set()


def test_every_variable_of_ray_is_one_that_it_documents() -> None:
    named = {
        (file, node.value)
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"(RAY|AUTOSCALER|LOG)_\w+", node.value)
    }
    assert {(file, name) for file, name in named if name not in DOCUMENTED | NEEDED} == set()
    assert (DOCUMENTED | NEEDED).keys() <= {name for _, name in named}
