"""Who may import whom, and how large things may get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform" / "tokendrop"

# layer (a folder or file of the package): layers that it may import beside itself
OURS = {
    "errors": set(),
    "atomic": {"errors"},
    "schedule": set(),
    "method": set(),
    "output": set(),
    "config": {"errors", "method", "schedule"},
    "models": {"config", "errors", "schedule"},
    "data": {"atomic", "config", "errors", "models", "schedule"},
    "train": {"config", "errors", "method", "models", "schedule"},
    "tasks": {"config", "data", "errors", "models", "train"},
    "track": {"atomic", "config", "data", "errors", "models", "schedule", "train"},
    "elastic": {"errors", "schedule", "track", "train"},
    "evaluate": {"atomic", "config", "data", "errors", "models", "output", "schedule", "track", "train"},
    "report": {"atomic", "config", "data", "errors", "output", "schedule", "track", "train"},
    "results": {"errors", "report"},
    "bench": {"config", "data", "errors", "evaluate", "launch", "method", "models", "schedule", "track", "train"},
}
OURS["bench"].add("elastic")
OURS["launch"] = set(OURS) - {"bench", "evaluate", "report", "results", "tasks"}
OURS["study"] = set(OURS) - {"bench", "evaluate", "report", "results", "tasks"}
OURS["cli"] = set(OURS)
OURS |= {"__main__": {"cli"}, "__init__": set()}
for one in set(OURS) - {"method", "schedule", "__init__", "__main__"}:
    OURS[one].add("secrets")  # by which whatever leaves the process goes
OURS["secrets"] = set()

# the rooms of data/, in the order in which they may import each other
ROOMS = ["corpus", "shards", "read", "prepare"]

# layer, or one file of it: packages of others; what a file has is what it may import beyond its layer
FOREIGN = {
    "config": {"yaml"},
    "method": {"torch"},
    "method/hugging_face.py": {"transformers"},
    "models": {"numpy", "torch"},
    "models/pretrained.py": {"transformers"},
    "models/pretrained_bert.py": {"transformers"},
    "models/pretrained_vit.py": {"timm"},
    "models/hugging_face.py": {"transformers"},
    "tasks": {"numpy", "torch"},
    "tasks/text_classification.py": {"scipy", "sklearn"},
    "data": {"numpy", "pyarrow", "tokenizers"},
    "data/shards/format.py": {"xxhash"},
    "data/read/batches.py": {"torch"},
    "data/read/image_rows.py": {"xxhash"},
    "data/read/images.py": {"PIL", "torch", "torchvision"},
    "data/prepare/images.py": {"PIL"},
    "data/prepare/encoder.py": {"tiktoken"},
    "data/prepare/stages.py": {"ray"},
    "train": {"torch"},
    "train/task.py": {"numpy"},
    "train/engines/deepspeed.py": {"deepspeed"},
    "train/fp8.py": {"torchao"},
    "track": {"pyarrow"},
    "track/audit.py": {"numpy"},
    "track/mlflow.py": {"mlflow"},
    "track/mlflow_run.py": {"mlflow"},
    "track/registry.py": {"mlflow"},
    "track/prometheus.py": {"ray"},
    "evaluate": {"datasets", "huggingface_hub", "lm_eval", "numpy", "tokenizers", "torch", "tqdm", "transformers"},
    "evaluate/task_data.py": {"yaml"},
    "report": {"numpy"},
    "report/charts.py": {"altair"},
    "report/figure.py": {"vl_convert"},
    "report/page.py": {"jinja2", "vl_convert"},
    "report/arms.py": {"scipy"},
    "report/record.py": {"pyarrow"},
    "report/listing.py": {"yaml"},
    "report/where.py": {"yaml"},
    "results": {"pyarrow"},
    "bench": {"numpy", "torch"},
    "bench/evaluate.py": {"lm_eval", "transformers"},
    "bench/images.py": {"PIL", "torchvision"},
    "bench/node_link.py": {"ray"},
    "bench/overhead.py": {"psutil"},
    "bench/peers.py": {"datasets", "pyarrow", "ray"},
    "bench/picture.py": {"matplotlib"},
    "bench/preparation.py": {"psutil", "pyarrow"},
    "bench/reading.py": {"pyarrow"},
    "bench/slow_store.py": {"fsspec"},
    "bench/workers.py": {"ray"},
    "elastic": {"ray", "torch"},
    "launch": {"aiohttp", "numpy", "ray", "requests", "torch", "yaml"},
    "launch/head.py": {"grpc"},
    "launch/cleanup.py": {"psutil"},
    "launch/cluster.py": {"setproctitle"},
    "launch/local_cluster.py": {"psutil"},
    "launch/local_ray.py": {"psutil"},
    "launch/local_nodes.py": {"psutil"},
    "launch/memory.py": {"psutil"},
    "launch/preflight.py": {"pathspec"},
    "output": {"rich"},
    "study": {"optuna", "pyarrow", "ray", "scipy"},
    "cli/completion.py": {"shtab"},
    **{f"cli/{name}.py": {"ray"} for name in ("evaluate", "prepare", "sweep", "train")},
}
# these run where nothing but the standard library, PyYAML, numpy and torch is installed
LIGHT = ["schedule", "config", "method", "models", "train"]
# what a job or a user of other models asks for by name, imported when they do
ON_REQUEST = {"deepspeed", "timm", "torchao", "transformers"}

LONGEST_FILE, LONGEST_FUNCTION = 300, 40


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Dotted names of all that the code below a node imports, function bodies included."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, "relative imports hide which layer they reach"
            module = tuple((part.module or "").split("."))
            yield from ((*module, alias.name) for alias in part.names)
            yield module


def module(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_there_is_code_to_look_at() -> None:
    assert {"schedule/plan.py", "train/loop.py", "cli/main.py"} <= {name(path) for path in files()}


@pytest.mark.parametrize("path", files(), ids=name)
def test_a_layer_imports_only_the_layers_below_it(path: Path) -> None:
    below = OURS[layer(path)] | {layer(path)}
    reached = {one[1] for one in imported(tree(path)) if one[0] == "tokendrop" and len(one) > 1}
    assert reached <= below


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_data_imports_only_the_rooms_before_it(room: str) -> None:
    reached = {
        one[2]
        for path in (PACKAGE / "data" / room).glob("*.py")
        for one in imported(tree(path))
        if one[:2] == ("tokendrop", "data") and len(one) > 2
    }
    assert reached & {*ROOMS} <= {*ROOMS[: ROOMS.index(room) + 1]}


@pytest.mark.parametrize("path", files(), ids=name)
def test_a_layer_imports_only_the_packages_that_it_is_known_for(path: Path) -> None:
    allowed = FOREIGN.get(layer(path), set()) | FOREIGN.get(name(path), set()) | set(sys.stdlib_module_names)
    assert {one[0] for one in imported(tree(path))} - {"tokendrop"} <= allowed


# what a task is made of, which everything else knows by `tokendrop.train.task.Task` alone
OF_TASKS = {"Gpt", "GptConfig", "Bert", "BertConfig", "BertClassifier", "Vit", "VitConfig"}
OF_TASKS |= {"TextBatch", "BertBatch", "ExampleBatch", "ImageBatch", "text_batch", "pair_batch", "example_batch"}
OF_TASKS |= {"build_model", "build_bert", "build_classifier", "build_vit"}


@pytest.mark.parametrize(
    "path", [path for path in files() if layer(path) not in ("config", "models", "tasks")], ids=name
)
def test_models_and_batches_are_known_to_tasks_alone(path: Path) -> None:
    assert not {one[-1] for one in imported(tree(path))} & OF_TASKS


def test_layers_form_no_cycle() -> None:
    """Each layer stands after all layers that it may import."""
    order: list[str] = []
    while len(order) < len(OURS):
        ready = [one for one, below in OURS.items() if one not in order and below - {one} <= set(order)]
        assert ready, f"a cycle among {set(OURS) - set(order)}"
        order += ready


def test_modules_form_no_cycle() -> None:
    """Nor do the files within a layer, imports in functions included."""
    modules = {module(path): path for path in files()}
    left = {
        one: {other for other in imported(tree(path)) if other in modules and other != one}
        for one, path in modules.items()
    }
    while left:
        ready = [one for one, below in left.items() if not below & set(left)]
        assert ready, f"a cycle among {sorted('.'.join(one) for one in left)}"
        for one in ready:
            del left[one]


@pytest.mark.parametrize("path", [path for path in files() if layer(path) in ("__main__", "cli", "output")], ids=name)
def test_commands_import_nothing_heavy_until_they_need_it(path: Path) -> None:
    """`tokendrop plan` needs neither torch nor Ray."""
    at_the_top = [node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    reached = {one for node in at_the_top for one in imported(node)}
    assert {one[0] for one in reached} <= {"tokendrop", *sys.stdlib_module_names}
    light = {"cli", "config", "errors", "output", "schedule", "secrets"}
    assert {one[1] for one in reached if one[0] == "tokendrop" and len(one) > 1} <= light


@pytest.mark.parametrize("one", LIGHT)
def test_what_trains_is_allowed_no_more_than_yaml_numpy_and_torch(one: str) -> None:
    names = {one, *(name for name in FOREIGN if name.startswith(f"{one}/"))}
    assert set().union(*(FOREIGN.get(name, set()) for name in names)) - ON_REQUEST <= {"yaml", "numpy", "torch"}
    assert OURS[one] <= {*LIGHT, "errors", "secrets"}


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Forbid(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in {forbidden}:
            raise ImportError(f"{{fullname}} is not installed here")

sys.meta_path.insert(0, Forbid())
import {modules}
assert not {forbidden} & {{module.split(".")[0] for module in sys.modules}}
print("imported")
"""
HEAVY = {"ray", "mlflow", "pyarrow", "tokenizers", "transformers", "lm_eval", "deepspeed", "psutil", "torchao"}


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("tokendrop.schedule.plan, tokendrop.method, tokendrop.models.build, tokendrop.train.loop", HEAVY),
        ("tokendrop.train.engines.build, tokendrop.train.optimizer, tokendrop.train.device", HEAVY),
        ("tokendrop.cli.bench, tokendrop.bench.step", HEAVY),
        ("tokendrop.cli.device, tokendrop.bench.device", HEAVY | {"rich"}),
        ("tokendrop.method", HEAVY | {"yaml"}),
        ("tokendrop.cli.main, tokendrop.config.load, tokendrop.output", HEAVY | {"torch", "numpy", "rich", "shtab"}),
        ("tokendrop.track.audit, tokendrop.track.run_folder", {"ray", "torch"}),
        ("tokendrop.schedule.plan", HEAVY | {"torch", "numpy", "yaml"}),
    ],
    ids=["training", "engines", "bench step", "bench device", "method", "planning", "audit", "schedule"],
)
def test_it_imports_without(modules: str, forbidden: set[str]) -> None:
    code = WITHOUT.format(modules=modules, forbidden=forbidden)
    path = {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.parametrize("folder", ["platform", "jobs", "cluster", "dashboards", "tests"])
def test_folders_of_files_are_not_packages(folder: str) -> None:
    """A package named `platform` would shadow the standard library's."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "path", [*files(), *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_file_stays_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST_FILE


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring left out."""
    first = function.body[0]
    docstring = 0 if ast.get_docstring(function) is None else first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - docstring


@pytest.mark.parametrize("path", files(), ids=name)
def test_a_function_stays_short(path: Path) -> None:
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {function.name: length(function) for function in functions if length(function) >= LONGEST_FUNCTION} == {}
