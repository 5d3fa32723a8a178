"""The example of each command's --help is one that works."""

import re
import shlex
from pathlib import Path

import pytest

from tokendrop.cli.main import all_commands, parse
from tokendrop.config.load import load_job

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("example", [command.example for command in all_commands()])
def test_an_example_is_a_command_whose_jobs_load(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"tokendrop ([^)]*)", example)  # in one it is a part of a line
    options = parse(shlex.split(command))
    for job in [getattr(options, "job", None), *getattr(options, "jobs", [])]:
        if job is not None:
            load_job(job, getattr(options, "overrides", []))
