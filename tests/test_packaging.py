"""What an installation of the package brings, and which versions are tested."""

import json
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
JOB = ROOT / "jobs" / "pretrain" / "quickstart.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(name: str) -> dict[str, str]:
    """What a file of .ci pins by itself."""
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_core_is_torch_numpy_and_yaml_in_versions_that_others_have_too() -> None:
    core = [Requirement(one) for one in PROJECT["dependencies"]]
    assert {one.name for one in core} == {"torch", "numpy", "PyYAML"}
    assert all({limit.operator for limit in one.specifier} == {">="} for one in core)


@pytest.mark.parametrize("extra", ["bench", "eval", "dev"])
def test_extras_that_are_no_use_without_the_platform_bring_it(extra: str) -> None:
    ours = [Requirement(one) for one in EXTRAS[extra] if one.startswith("tokendrop")]
    assert "platform" in set().union(*(one.extras for one in ours))


@pytest.mark.parametrize("ray", ["newest.txt", "oldest.txt"])
def test_one_version_of_each_package_is_installed_and_the_requirements_allow_it(ray: str) -> None:
    every = [Requirement(one) for one in [*PROJECT["dependencies"], *chain(*EXTRAS.values())]]
    others = [one for one in every if one.name != "tokendrop"]
    tested = pins("pins.txt") | pins(ray)
    exact = {one.name for one in others if [limit.operator for limit in one.specifier] == ["=="]}
    assert {one.name for one in others} == tested.keys() | exact
    assert not tested.keys() & exact
    assert all(one.specifier.contains(tested[one.name]) for one in others if one.name in tested)
    assert "-c pins.txt" in (ROOT / ".ci" / ray).read_text().splitlines()


def needed(names: list[str]) -> set[str]:
    """Packages and all that they need, as they are installed here."""
    found: set[str] = set()
    while names:
        one = distribution(names.pop())
        if one.name not in found:
            found.add(one.name)
            wanted = map(Requirement, one.requires or [])
            names += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A Python with our package, installed from a wheel, beside torch, numpy, PyYAML and what these need."""
    folder, pip = tmp_path_factory.mktemp("bare"), [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    (source := folder / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for path in (ROOT / "platform").rglob("*"):
        if path.suffix in (".py", ".yaml"):
            (copy := source / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder]
    subprocess.run([*pip, "wheel", *options, source], check=True, capture_output=True)
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    (links := folder / "links").mkdir()
    for name in needed([Requirement(one).name for one in PROJECT["dependencies"]]):
        one = distribution(name)
        for part in {Path(str(file)).parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not (links / part).exists():
                (links / part).symlink_to(one.locate_file(part))
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "links.pth").write_text(f"{links}\n")
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    # fails where the wheel wants anything beyond what is there
    subprocess.run([*pip, "--python", python, "install", "--quiet", "--no-index", wheel], check=True, env={})
    return python


def ask(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [python, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env={}, timeout=250)


@pytest.mark.long
def test_an_installation_without_extras_has_the_method_plans_and_measures_steps(bare: Path) -> None:
    asked = "import importlib.metadata as m; print(*(one for one in m.requires('tokendrop') if 'extra' not in one))"
    assert {Requirement(one).name for one in ask(bare, "-c", asked).stdout.split()} == {"torch", "numpy", "PyYAML"}
    imports = ["method", "schedule.plan", "models.build", "train.loop", "train.engines.build"]
    done = ask(bare, "-c", ";".join(f"import tokendrop.{one}" for one in imports))
    assert (done.returncode, done.stderr) == (0, "")

    tokendrop = bare.parent / "tokendrop"
    assert ask(tokendrop, "--version").stdout == f"tokendrop {version('tokendrop')}\n"
    for overrides in ([], ["scaling.profile=a100-40g-8"]):  # which lies in the wheel
        plan = ask(tokendrop, "plan", JOB, *overrides, "--json")
        assert json.loads(plan.stdout)["steps"] > 0, plan.stderr
    step = ask(tokendrop, "bench", "step", "--preset", "gpt-1m", "--micro-batch", "1", "--rounds", "1", "--json")
    assert json.loads(step.stdout)["figures"], step.stderr


@pytest.mark.long
@pytest.mark.parametrize(("command", "extra"), [(("train", JOB), "platform"), (("evaluate", "runs/gpt"), "eval")])
def test_a_command_beyond_the_core_names_the_extra_that_it_needs(bare: Path, command, extra: str) -> None:
    done = ask(bare.parent / "tokendrop", *command)
    assert done.returncode == 2
    assert done.stderr.endswith(f" is not installed; pip install 'tokendrop[{extra}]'\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1
