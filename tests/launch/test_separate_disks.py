"""A run in a store whose driver and workers share no disk: it changes workers, dies and goes on, bit for bit."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from checkouts import MIB
from heads import TOKEN, ray_head, short_folder, wait_for_nodes
from kills import Command
from runs import FLOAT64, config_of, kill_at, losses, write_job
from stores import S3
from tokendrop.launch.train_loop import fit_in_this_process
from tokendrop.launch.trainer import run_training
from tokendrop.track.audit import audit
from tokendrop.track.run_copy import copied_run
from tokendrop.track.run_files import committed_in
from tokendrop.track.run_folder import open_run_folder, read_attempts
from tokendrop.track.run_store import RunStore, address_below, runs_place

pytestmark = pytest.mark.ray

PATIENCE_S = 480.0
OWN_DISKS = ("unshare", "--mount", "--map-root-user")
LENGTH = ("train.length=300 steps", "checkpoint.every=30 steps", "evaluate.every=100 steps")
BY_PLAN = ("scaling.mode=schedule", "scaling.segments=[{from: 0%, workers: 1}, {from: 90 steps, workers: 2}]")


@contextmanager
def nodes_with_disks_of_their_own(hidden: Path, temporary: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a Ray of a head without cores and two nodes of one, on each of which a folder is another one."""
    if subprocess.run([*OWN_DISKS, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    options = {"num-cpus": 0, "node-ip-address": "127.0.0.2"}
    with ray_head(sys.executable, temporary / "head", environment, options) as head:
        dashboard = f"http://127.0.0.1:{head.dashboard}"
        wait_for_nodes(dashboard)
        address, nodes = f"127.0.0.2:{head.gcs}", list[subprocess.Popen[bytes]]()
        join = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
        join += ["--num-cpus=1", f"--object-store-memory={150 * MIB}", "--dashboard-agent-listen-port=0"]
        join += ["--min-worker-port=0", "--max-worker-port=0"]
        # a node whose agents are slow to start ends, and is started again
        mount = ["sh", "-c", 'mount -t tmpfs tmpfs "$0" && until "$@"; do :; done', str(hidden)]
        try:
            for number in (3, 4):
                place = [f"--node-ip-address=127.0.0.{number}", f"--temp-dir={temporary / str(number)}"]
                command = [*OWN_DISKS, *mount, *join, *place]
                nodes.append(subprocess.Popen(command, env=environment, start_new_session=True))
                wait_for_nodes(dashboard, 1 + len(nodes))
            yield address
        finally:
            for node in nodes:
                started = psutil.Process(node.pid)
                for process in (started, *started.children(recursive=True)):
                    process.kill()
                node.wait()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_a_run_without_a_shared_disk_changes_workers_loses_them_and_its_driver_and_is_the_same(
    tmp_path: Path, s3: S3
) -> None:
    job, runs = write_job(tmp_path), s3.uri(f"bucket/{tmp_path.name}")
    address = address_below(runs, "one")
    here = Path(run_training(config_of(job, *LENGTH), fit=fit_in_this_process)["run"])
    shards = s3.upload(open_run_folder(here)[1], "corpus")
    settings = (f"runs_folder={runs}", "run=one", f"data.folder={shards}", f"data.cache.folder={tmp_path}/cache")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "lo"}
    with short_folder() as temporary, nodes_with_disks_of_their_own(tmp_path, temporary, environment) as cluster:
        environment |= {"RAY_ADDRESS": cluster}
        store = RunStore(address)
        copies = tmp_path / "here"
        with Command("train", job, *LENGTH, *BY_PLAN, *settings, environment=environment) as command:
            killer = threading.Thread(target=kill_at, args=(runs_place(runs), 135), daemon=True)
            killer.start()
            assert command.until(
                lambda: max(committed_in(store.files("checkpoints")), default=0) >= 210,
                "step 210",
                patience_s=PATIENCE_S,
            )
            command.kill_all()
        killer.join()
        assert not any(copies.rglob("step_*"))  # workers write to disks of their own
        shutil.rmtree(copies)
        with Command("train", "--resume", address, environment=environment) as command:
            command.finish(patience_s=PATIENCE_S)
    far = copied_run(address)
    np.testing.assert_allclose(losses(far), losses(here), rtol=FLOAT64)
    found = audit(far)
    assert found.is_clean
    assert [one.world_size for one in found.world_sizes][:2] == [1, 2]
    attempts, resizes = read_attempts(far)
    assert [(one["resize_at"], one["from"], one["to"]) for one in resizes] == [(90, 1, 2)]
    assert len(attempts) >= 4
