"""A spot machine's notice, by imitations of the clouds' metadata addresses, becomes a drain of a real Ray node."""

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkouts import ROOT
from heads import end, ray_head, short_folder

SCRIPT = ROOT / "cluster" / "images" / "drain_on_notice.py"
INSIDE = "/opt/tokendrop/drain_on_notice.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("drain_on_notice", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


watcher = load()


class Cloud:
    """What a metadata address knows; a notice is set while it is asked."""

    aws: datetime | str | None = None
    gcp: str | None = None
    is_aws = is_gcp = True


@contextmanager
def metadata(cloud: Cloud) -> Iterator[str]:
    """Answers as EC2's IMDSv2 and Google Cloud's metadata server do: nothing without token and header."""
    token = secrets.token_hex(8)

    class Answers(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            is_right = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
            self.answer(200 if cloud.is_aws and is_right else 404, token)

        def do_GET(self) -> None:
            if cloud.is_aws and self.path == "/latest/meta-data/spot/instance-action":
                if self.headers["X-aws-ec2-metadata-token"] != token:
                    self.answer(401)
                elif cloud.aws is None:
                    self.answer(404)
                else:
                    at = cloud.aws if isinstance(cloud.aws, str) else cloud.aws.strftime("%Y-%m-%dT%H:%M:%SZ")
                    self.answer(200, json.dumps({"action": "terminate", "time": at}))
            elif cloud.is_gcp and self.path == "/computeMetadata/v1/instance/preempted":
                is_asked_right = self.headers["Metadata-Flavor"] == "Google"
                self.answer(200 if is_asked_right else 403, cloud.gcp or "FALSE")
            else:
                self.answer(404)

        def answer(self, code: int, text: str = "") -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_a_notice_is_seen_with_the_time_that_is_left_and_nothing_else_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody is
    cloud = Cloud()
    with metadata(cloud) as address:
        assert watcher.aws_notice_s(address) is None
        assert watcher.gcp_notice_s(address) is None
        cloud.aws = datetime.now(UTC) + timedelta(seconds=120)
        assert 115 < watcher.aws_notice_s(address) <= 120
        cloud.aws = datetime.now(UTC) - timedelta(seconds=9)
        assert watcher.aws_notice_s(address) == 0
        cloud.aws = "soon"
        assert watcher.aws_notice_s(address) is None
        cloud.gcp = "TRUE\n"
        assert 0 < watcher.gcp_notice_s(address) <= 30
        cloud.is_aws = cloud.is_gcp = False
        assert watcher.aws_notice_s(address) is watcher.gcp_notice_s(address) is None
    assert watcher.aws_notice_s(address) is watcher.gcp_notice_s(address) is None


@pytest.mark.ray
@pytest.mark.parametrize("starts_again", [False, True], ids=["", "Ray is started again meanwhile"])
def test_a_notice_drains_the_node_that_the_watcher_runs_on(starts_again: bool) -> None:
    """What a run does about a drain is in launch/test_autoscaling.py."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cloud, options = Cloud(), {"num-cpus": 1, "node-ip-address": "127.0.0.2"}
    with ExitStack() as everything, ExitStack() as first:
        address = everything.enter_context(metadata(cloud))
        folders = [everything.enter_context(short_folder()) for _ in range(2)]
        head = first.enter_context(ray_head(sys.executable, folders[0], environment, options))
        watch = subprocess.Popen(
            [sys.executable, SCRIPT, "auto", f"--metadata={address}"],
            env=environment | {"RAY_ADDRESS": f"127.0.0.2:{head.gcs}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        everything.callback(end, watch)
        assert watch.stdout is not None
        line = next(line for line in watch.stdout if not line.startswith("waiting for Ray"))
        watching = re.fullmatch(r"watching for a notice to node (\w{56})\n", line)
        assert watching is not None, line
        if starts_again:
            first.close()
            options |= {"port": head.gcs}
            everything.enter_context(ray_head(sys.executable, folders[1], environment, options))
        cloud.aws = datetime.now(UTC) + timedelta(seconds=120)
        line = next(line for line in watch.stdout if not line.startswith("waiting for Ray"))
        drained = re.fullmatch(r"drained node (\w{56}), 1\d\d s before its end\n", line)
        assert drained is not None, line
        assert (drained[1] != watching[1]) == starts_again
        assert watch.wait(60) == 0


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_every_spot_machine_watches(cloud: str) -> None:
    config = yaml.safe_load((ROOT / "cluster" / "ray_up" / f"{cloud}.yaml").read_text())
    *_, start, watch = config["worker_start_ray_commands"]
    assert "ray start" in start
    assert f" python {INSIDE} {cloud} " in watch
    assert cloud in watcher.NOTICES


def test_every_worker_pod_watches_and_the_image_has_the_watcher() -> None:
    *_, cluster = yaml.safe_load_all((ROOT / "cluster" / "kuberay" / "raycluster.yaml").read_text())
    for group in cluster["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        command = container["lifecycle"]["postStart"]["exec"]["command"]
        assert f"python {INSIDE} auto " in command[-1]
        subprocess.run(["bash", "-n", "-c", command[-1]], check=True)
    dockerfile = (ROOT / "cluster" / "images" / "Dockerfile").read_text()
    assert f"COPY {SCRIPT.relative_to(ROOT)} {Path(INSIDE).parent}/" in dockerfile
