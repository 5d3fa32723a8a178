"""What machines of `ray up` run beside Ray, by the lines that Ray gives to their shells, with programs of our own."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from checkouts import ROOT

PROGRAMS = {"head_start_ray_commands": "mlflow", "worker_start_ray_commands": "python"}


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("commands", PROGRAMS)
def test_it_is_started_where_it_does_not_run(cloud: str, commands: str, tmp_path: Path) -> None:
    """Again and again, as each `ray up` does."""
    config = yaml.safe_load((ROOT / "cluster" / "ray_up" / f"{cloud}.yaml").read_text())
    (line,) = (one for one in config[commands] if one.endswith("&"))
    line = re.sub(r"(?<![\w.])/(data|tmp)/", rf"{tmp_path}/\1/", line)
    (tmp_path / "tmp").mkdir()
    started = tmp_path / "started"
    program = tmp_path / "bin" / PROGRAMS[commands]
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $$ >> {started}\nexec sleep 60\n")
    program.chmod(0o755)

    def start() -> None:
        environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", f"bash -c '({line})'"], env=environment, check=True)

    def running() -> list[int]:
        return [int(pid) for pid in started.read_text().split()] if started.exists() else []

    start()
    until(lambda: len(running()) == 1)
    try:
        for _ in range(3):
            start()
        time.sleep(0.5)
        assert len(running()) == 1
        os.kill(running()[-1], signal.SIGKILL)
        until(lambda: start() or len(running()) == 2)
    finally:
        os.kill(running()[-1], signal.SIGKILL)
