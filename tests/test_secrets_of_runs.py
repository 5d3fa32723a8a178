"""Users, passwords and keys of a job: after a whole run they are in no file that it wrote, in no line that it said."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import yaml
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer

from checkouts import free_ports
from corpora import documents, tiny_job, write_corpus
from servers import server

pytestmark = [pytest.mark.ray, pytest.mark.long]

SECRETS = {
    "user": "trackuser71",
    "password": "trackpass72",
    "key": "S3KEYIDENTITY73",
    "secret": "s3secret74",
    "web user": "webuser75",
    "web password": "webpass76",
    "token": "querytoken77",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUv78",
    "AWS_SECRET_ACCESS_KEY": "environment/secret79",
    "MLFLOW_TRACKING_PASSWORD": "environmentpass80",
    "SOME_STORE_TOKEN": "environmenttoken81",
}
IN_ENVIRONMENT = {name: value for name, value in SECRETS.items() if name.isupper()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Two corpora that want credentials: in a bucket, and behind a web address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    folder = tmp_path_factory.mktemp("web")
    content = write_corpus(folder / "web.jsonl", documents(80, seed=1)).read_bytes()
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    query = f"?endpoint_override={host}%3A{port}&scheme=http&allow_bucket_creation=true"
    store, _ = pafs.FileSystem.from_uri(f"s3://any:any@bucket{query}")
    store.create_dir("bucket")
    with store.open_output_stream("bucket/a.jsonl") as out:
        out.write(content)

    class SilentHandler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=str(folder))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        s3 = f"s3://{SECRETS['key']}:{SECRETS['secret']}@bucket/*.jsonl{query}"
        address = f"{SECRETS['web user']}:{SECRETS['web password']}@127.0.0.1:{web.server_port}"
        yield [
            {"name": "bucket", "corpus": [s3], "weight": 1},
            {"name": "web", "corpus": [f"http://{address}/web.jsonl?token={SECRETS['token']}"], "weight": 1},
        ]
        web.shutdown()
    moto.stop()


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Ray's session folder, whose sockets want a short path."""
    folder = Path(tempfile.mkdtemp(prefix="td", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def command(folder: Path, ray_folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; what it says is kept in a file there too."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with keeping_logs(ray_folder):
        done = subprocess.run(
            [sys.executable, "-m", "tokendrop", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=folder,
            env=env | IN_ENVIRONMENT | {"RAY_TMPDIR": str(ray_folder)},
            timeout=300,
            check=False,
        )
    with (folder / "said.txt").open("a") as file:
        file.write(done.stdout + done.stderr)
    return done


@contextmanager
def keeping_logs(ray_folder: Path) -> Iterator[None]:
    """Give the logs of a Ray, which go with it, a second name that stays."""
    kept, is_over = ray_folder / "kept", threading.Event()
    kept.mkdir(exist_ok=True)

    def keep() -> None:
        while not is_over.wait(0.1):
            for log in ray_folder.glob("tokendrop-ray-*/ray/session_*/logs/**/*"):
                with suppress(OSError):  # it was kept already, or is gone
                    os.link(log, kept / f"{log.stat().st_ino}{log.suffix}")

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield
    finally:
        is_over.set()
        keeper.join()


def told(*folders: Path) -> set[tuple[str, str]]:
    """Which secret is in which file, plain or as HTTP sends it."""
    found: set[tuple[str, str]] = set()
    pair = b64encode(f"{SECRETS['user']}:{SECRETS['password']}".encode()).decode()
    for folder in folders:
        for path in folder.rglob("*"):
            found |= {(name, str(path)) for name, value in SECRETS.items() if value in path.name}
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                found |= {(name, str(path)) for name, value in SECRETS.items() if value.encode() in content}
                found |= {("pair", str(path))} if pair.encode() in content else set()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sources, ray_folder) -> Iterator[tuple[Path, Path, str]]:
    """A folder with a run whose job is full of secrets, the job elsewhere, and the tracking server's address."""
    folder, elsewhere = tmp_path_factory.mktemp("told"), tmp_path_factory.mktemp("job")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    uri = f"http://{SECRETS['user']}:{SECRETS['password']}@{address}"
    job = tiny_job(elsewhere, [], data={"corpus": [], "sources": sources})
    tree = yaml.safe_load(job.read_text())
    tree |= {"runs_folder": str(folder / "runs"), "data": tree["data"] | {"folder": str(folder / "shards")}}
    job.write_text(yaml.safe_dump(tree))
    with server(folder, port):
        done = command(folder, ray_folder, "train", job, "run=first", f"track.uri={uri}")
        assert done.returncode == 0, done.stderr
        yield folder, job, uri


def test_no_secret_is_in_what_a_run_leaves_behind(trained, ray_folder):
    folder, _, uri = trained
    assert list(folder.rglob("job.yaml"))
    assert list(folder.rglob("manifest.json"))
    assert list(ray_folder.rglob("*.log"))
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tokendrop").experiment_id])
    assert len(client.list_artifacts(run.info.run_id)) == 3
    assert "<hidden>@127.0.0.1" in run.data.params["track.uri"]
    assert told(folder, ray_folder) == set()


def test_a_run_goes_on_only_with_its_secrets(trained, ray_folder, sources):
    folder, _, uri = trained
    run = folder / "runs" / "first"
    said = command(folder, ray_folder, "train", "--resume", run, "train.length=3 steps")
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert "data.sources[0].corpus[0]: s3://<hidden>@bucket" in said.stderr
    assert "give data.sources[0].corpus[0]=... on the command line, or set AWS_ACCESS_KEY_ID" in said.stderr
    again = yaml.safe_dump(sources, default_flow_style=True, width=10**6)
    tracked = f"track.uri={uri}"
    said = command(folder, ray_folder, "train", "--resume", run, "train.length=3 steps", f"data.sources={again}")
    assert said.returncode == 2
    assert "track.uri: http://<hidden>@127.0.0.1" in said.stderr
    assert "MLFLOW_TRACKING_USERNAME" in said.stderr
    resumed = command(folder, ray_folder, "train", "--resume", run, f"data.sources={again}", tracked, "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert len(list((folder / "shards").iterdir())) == 1, "the secrets are no part of what the shards are known by"
    assert told(folder, ray_folder) == set()


def test_a_failure_tells_no_secret(trained, ray_folder, tmp_path):
    folder, job, _ = trained
    (port,) = free_ports(1)
    away = f"track.uri=http://{SECRETS['user']}:{SECRETS['password']}@127.0.0.1:{port}"
    assert "<hidden>@127.0.0.1" in command(tmp_path, ray_folder, "train", job, away, "train.length=3 steps").stderr
    for mistake in (
        f"{away} x",
        "data.corpus=[s3://{key}:{secret}@bucket/none.jsonl]".format(**SECRETS),
        "track.uri=[1",
    ):
        command(tmp_path, ray_folder, "plan", job, away, mistake)
    assert command(tmp_path, ray_folder, "sync", folder / "runs" / "first").returncode == 2
    assert told(tmp_path, ray_folder) == set()
