"""`tokendrop cluster down` gives up by name on what does not end, and goes on later."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tokendrop.cli.main import main
from tokendrop.launch import local_cluster
from tokendrop.launch.local_cluster import find, processes
from tokendrop.launch.local_head import MARK, ClusterError, ClusterSize, LocalCluster


@pytest.fixture
def cluster(state: Path, tmp_path: Path) -> LocalCluster:
    """A cluster as its state file tells of it, with files and without processes."""
    size = ClusterSize(min_nodes=0, max_nodes=1, cpus_per_node=1, gpus_per_node=0, idle_timeout_s=1)
    address = {"address": "127.0.0.1:1", "dashboard": "http://127.0.0.1:2"}
    found = LocalCluster(mark="stays", folder=str(tmp_path / "ray"), access={}, size=size, **address)
    Path(found.folder).mkdir()
    state.parent.mkdir(exist_ok=True)
    state.write_text(json.dumps(asdict(found)))
    return found


@contextmanager
def never_all_gone(mark: str, count: int = 4) -> Iterator[None]:
    """Processes of a cluster, each of which is back as soon as it is killed."""
    over = threading.Event()

    def keep_one() -> None:
        while not over.is_set():
            with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: mark}, start_new_session=True) as process:
                while process.poll() is None and not over.wait(0.01):
                    pass
                process.kill()

    keepers = [threading.Thread(target=keep_one) for _ in range(count)]
    for keeper in keepers:
        keeper.start()
    try:
        yield
    finally:
        over.set()
        for keeper in keepers:
            keeper.join()


@pytest.mark.timeout(60)
def test_what_does_not_end_is_named_and_a_later_down_goes_on(
    cluster: LocalCluster, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_cluster, "_STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(local_cluster, "_KILL_TIMEOUT_S", 1.0)
    with never_all_gone(cluster.mark):
        while len(processes(cluster)) < 4:
            pass
        with pytest.raises(SystemExit) as ended:
            main(["cluster", "down"])
        assert find() == cluster
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"tokendrop: the local cluster at 127\.0\.0\.1:1 is not down: killed, but not ended:"
        r" process \d+ \(sleep, \w+\)(, process \d+ \(sleep, \w+\))*; 'tokendrop cluster down' tries again\n",
        err,
    )
    main(["cluster", "down"])
    assert not state.exists()
    assert not Path(cluster.folder).exists()


@pytest.mark.parametrize(
    ("said", "starts"), [("The current node timed out during startup.", 3), ("no such option: --head", 1)]
)
def test_a_head_that_misses_its_own_deadlines_is_started_again(
    said: str, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    def failing(cluster: LocalCluster) -> subprocess.Popen[bytes]:
        tried.append(Path(cluster.folder))
        tried[-1].mkdir()
        with cluster.log.open("wb") as log:
            return subprocess.Popen([sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"], stdout=log)

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(local_cluster, "start_head", failing)
    size = ClusterSize(min_nodes=0, max_nodes=1, cpus_per_node=1, gpus_per_node=0, idle_timeout_s=10.0)
    with pytest.raises(ClusterError, match="the local cluster did not start"):
        local_cluster.start(size)
    assert len(tried) == starts
    assert not tried[-1].exists()
    assert find() is None
