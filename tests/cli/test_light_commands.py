"""What commands do where nothing but torch, numpy and PyYAML is installed; `--help` and `plan` need PyYAML alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tokendrop.cli.main import all_commands

ROOT = Path(__file__).parents[2]
JOB = str(ROOT / "jobs" / "pretrain" / "quickstart.yaml")
WITHOUT = """
import contextlib, io, json, sys

sys.modules |= dict.fromkeys({forbidden!r})
from tokendrop.cli.main import main

ended = []
for arguments in json.loads(sys.argv[1]):
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    ended.append([code or 0, out.getvalue(), err.getvalue()])
print(json.dumps(ended))
"""
BEYOND = {"ray", "mlflow", "pyarrow", "tokenizers", "psutil", "rich", "shtab", "lm_eval", "transformers", "aiohttp"}
CORE = {"plan", "import deepspeed", "bench step", "bench device"}
GIVEN = {
    "profile": [JOB, "--out", "new.yaml"],
    "prepare": [JOB],
    "train": [JOB],
    "fork": ["run", "--at", "1"],
    "watch": ["run"],
    "compare": [JOB, JOB],
    "bench evaluate": ["--task-data", "documents", "--tokenizer", "tokenizer.json"],
    "evaluate": ["run"],
    "export": ["run", "--to", "folder"],
    "generate": ["run", "--prompt", "text"],
    "report": ["run"],
    "reproduce run": ["growth", "--studies", str(ROOT / "jobs" / "studies")],
    "runs show": ["run"],
    "runs diff": ["run", "run"],
    "runs clean": ["--older", "30d"],
    "submit": [JOB],
    "sweep": [str(ROOT / "jobs" / "sweeps" / "start_length.yaml")],
    "sync": ["run"],
    "data show": ["shards", "--sample", "0"],
    "completion": ["bash"],
    "data audit": ["run"],
    "data stats": ["run"],
    "data verify": ["run"],
}
"""What a command is given, so that it gets as far as to what it needs."""


def ends_of(commands: list[list[str]], forbidden: set[str], folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of commands where some packages are not installed."""
    code, env = WITHOUT.format(forbidden=forbidden), {"PYTHONPATH": str(ROOT / "platform")}
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(end) for end in json.loads(done.stdout)]


def test_help_and_plans_need_yaml_alone(tmp_path: Path) -> None:
    helped = [[*command.name.split(), "--help"] for command in all_commands()]
    ends = ends_of([["--help"], ["data", "--help"], *helped, ["plan", JOB]], BEYOND | {"torch", "numpy"}, tmp_path)
    assert [(code, err) for code, _, err in ends] == [(0, "")] * len(ends)
    assert all(out.startswith("usage: ") for _, out, _ in ends[:-1])
    assert ends[-1][1].startswith("run            quickstart-random-ltd: ")


def test_a_command_whose_packages_are_not_installed_names_their_extra(tmp_path: Path) -> None:
    commands = [command for command in all_commands() if command.name not in CORE]
    ends = ends_of([[*one.name.split(), *GIVEN.get(one.name, [])] for one in commands], BEYOND, tmp_path)
    for command, (code, out, err) in zip(commands, ends, strict=True):
        assert (code, out) == (2, ""), (command.name, err)
        said = re.fullmatch(r"tokendrop: (.*): (\w+) is not installed; pip install 'tokendrop\[(\w+)\]'\n", err)
        assert said, err
        assert (said[1], said[3]) == (command.name, command.extra)
        assert said[2] in BEYOND
    assert list(tmp_path.iterdir()) == []


def test_with_the_platform_alone_evaluation_names_its_own_extra(tmp_path: Path) -> None:
    missing = {"transformers", "lm_eval", "accelerate"}
    ends = ends_of([[name, *GIVEN[name]] for name in ("evaluate", "export")], missing, tmp_path)
    assert [code for code, _, _ in ends] == [2, 2]
    assert all(err.endswith(" is not installed; pip install 'tokendrop[eval]'\n") for _, _, err in ends), ends


@pytest.mark.parametrize("package", ["timm", "torchvision", "PIL"])
def test_what_images_need_is_an_extra_of_its_own(package: str, monkeypatch: pytest.MonkeyPatch, complaint) -> None:
    from tokendrop.cli import export, main

    def lacks(*_: object) -> None:
        raise ModuleNotFoundError(name=package)

    monkeypatch.setattr(export, "run_here", lacks)
    monkeypatch.setattr(main, "find_spec", lambda name: None)
    said = complaint("export", "runs/vit", "--to", "vit")
    assert said == f"export: {package} is not installed; pip install 'tokendrop[vision]'"


def test_a_module_of_ours_that_is_missing_is_no_matter_of_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokendrop.cli import main, plan

    def mistaken(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'tokendrop.nothing'", name="tokendrop.nothing")

    monkeypatch.setattr(plan, "load_job", mistaken)
    with pytest.raises(ModuleNotFoundError):
        main.main(["plan", "job.yaml"])


def test_a_checkout_runs_where_the_package_is_not_installed(tmp_path: Path) -> None:
    """As on a cluster whose image holds the dependencies alone."""
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)
    (tmp_path / "tokendrop").symlink_to(ROOT / "platform" / "tokendrop")
    command = "from tokendrop.cli.main import main; main(['--version'])"
    alone = [sys.executable, "-S", "-c", command]  # without site-packages
    environment = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(alone, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "tokendrop of a checkout\n"), done.stderr
