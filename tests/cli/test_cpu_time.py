"""What a command without work to do costs before it answers."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


_READS = "import argparse, dataclasses, json, pathlib, yaml"
"""What a command that reads a job can't do without."""


def cpu_s(*arguments: str) -> float:
    """User and system time of Python with these arguments, in a process of its own."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "platform")}
    to_nowhere = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=to_nowhere)
    _, status, used = os.wait4(process, 0)
    assert status == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.alone
@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", str(ROOT / "jobs" / "pretrain" / "quickstart.yaml")]], ids=["help", "plan"]
)
def test_help_and_a_plan_are_there_soon(arguments: list[str]) -> None:
    rounds = [(cpu_s("-c", _READS), cpu_s("-m", "tokendrop", *arguments)) for _ in range(3)]
    reads_s, command_s = (min(times) for times in zip(*rounds, strict=True))
    assert command_s < 8 * reads_s  # 0.3 s on cores that read in 0.037 s; torch alone, or Ray, takes more
