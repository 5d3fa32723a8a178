"""Processes that are started to be killed, and what is looked for in a run meanwhile and after."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tokendrop.launch.cluster import source_path
from tokendrop.track.journal import METRICS

LONGEST_WAIT_S = 240


class Command(subprocess.Popen[bytes]):
    """A command of tokendrop, in a process group of its own."""

    def __init__(self, *arguments: object, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the command is
        command = [sys.executable, "-m", "tokendrop", *map(str, arguments)]
        environment = {**environment, "PYTHONPATH": source_path()}
        super().__init__(command, env=environment, start_new_session=True, stdout=self._log, stderr=self._log)

    def said(self) -> str:
        log = self._log.fileno()  # to read from its begin by `seek` would move where the command writes
        return os.pread(log, os.fstat(log).st_size, 0).decode()

    def kill_all(self) -> None:
        """SIGKILL, to what it started too."""
        os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def until(self, what: Callable[[], bool], name: str, *, patience_s: float = LONGEST_WAIT_S) -> bool:
        """Whether it came true before the command was done; where it fails or takes long, so does the test."""
        deadline = time.monotonic() + patience_s
        while not what():
            if self.poll() is not None:
                assert self.returncode == 0, self.said()
                return False
            assert time.monotonic() < deadline, f"waited for {name} for {patience_s} s: {self.said()}"
            time.sleep(0.02)
        return True

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.kill_all()

    def finish(self, *, patience_s: float = LONGEST_WAIT_S) -> None:
        """Wait for its end, which is to be a success."""
        assert not self.until(lambda: False, "its end", patience_s=patience_s)


def processes_of_this_ray(name: str) -> list[psutil.Process]:
    """Those of that name on the Ray that this process has started; another one may run beside it."""
    return _with_words(psutil.Process().children(recursive=True), name)


def processes_named(*words: str) -> list[psutil.Process]:
    """Those that have all of the words in their command line."""
    return _with_words(psutil.process_iter(), *words)


def _with_words(processes: Iterable[psutil.Process], *words: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if all(word in line for word in words):
                found.append(process)
    return found


def lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def run_below(runs: Path, command: Command) -> Path:
    """The folder of the run that a command begins."""
    assert command.until(lambda: bool(list(runs.glob(f"*/{METRICS}"))), "the run")
    (metrics,) = runs.glob(f"*/{METRICS}")
    return metrics.parent


def last_step(run: Path) -> int:
    return max((json.loads(line).get("step", 0) for line in lines(run / METRICS) if line), default=0)


def worker_pid(run: Path) -> int:
    """Of rank 0, lately."""
    return [json.loads(line)["pid"] for line in lines(run / METRICS) if "attempt_from" in line][-1]


def audited(run: Path) -> tuple[int, int]:
    """Samples missing and samples repeated, as `tokendrop data audit` counts them."""
    command = [sys.executable, "-m", "tokendrop", "data", "audit", str(run), "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": source_path()}, stdout=subprocess.PIPE, check=False)
    report = json.loads(done.stdout)
    return report["missing"], report["repeated"]
