"""Submitting: what is checked before an upload, and whole jobs on a head that has the dependencies alone."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tokendrop.cli import main
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.launch import preflight, submit
from tokendrop.launch.cluster import in_job_copy
from tokendrop.track.run_folder import latest_checkpoint, open_run_folder
from tokendrop.train.checkpoint import read_meta

ROOT = Path(__file__).parents[2]
MIB = 2**20

JOB = {
    "name": "tiny",
    "model": {
        "kind": "gpt",
        "layers": 3,
        "width": 32,
        "heads": 2,
        "sequence_length": 32,
        "vocab_size": 512,
    },
    "data": {"corpus": ["text/*"], "tokenizer_vocab_size": 300, "validation_share": 0.2},
    "train": {"length": "3 steps", "global_batch": 8, "micro_batch": 4, "peak_lr": 1e-3},
    "drop": {
        "method": "random_ltd",
        "schedule": {"kind": "linear", "start": 8, "until": "70%", "increment": 4},
    },
    "scaling": {"workers": 1, "cpus_per_worker": 1},
    "checkpoint": {"every": "3 steps"},
    "evaluate": {"every": "3 steps", "sequences": 8},
    "track": {"uri": None},
}
"""Small enough to be done in seconds; its corpus is a relative path."""


def make_folder(folder: Path) -> Path:
    """A checkout as a user has it: the job and its text in it, the text out of git."""
    for name in ("jobs", "platform"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / ".gitignore").write_text("/text/\n/runs/\n")
    (folder / "jobs" / "tiny.yaml").write_text(yaml.safe_dump(JOB))
    (folder / "text").mkdir()
    words = [" ".join(f"word{(number * 31 + i * i) % 97}" for i in range(100)) for number in range(60)]
    (folder / "text" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for a checkout, as the current folder; enough for what is checked before an upload."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "run.py").touch()
    (tmp_path / "jobs" / "tiny.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / ".gitignore").write_text("/ignored/\n")
    for name in ("text", "ignored", "ignored/deep"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("some text")
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_file(path: Path, size_bytes: int) -> None:
    """A file of this size that takes no disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


# What is checked before an upload


def test_what_git_ignores_and_what_is_never_wanted_stays_behind(folder: Path):
    for name in (".git/objects/pack", ".venv/lib/torch.so", "jobs/__pycache__/run.pyc"):
        write_file(folder / name, MIB)
    (folder / "jobs" / ".gitignore").write_text("*.bin\n")
    write_file(folder / "jobs" / "model.bin", MIB)

    upload = preflight.list_upload(".")

    assert set(map(str, upload.sizes)) == {
        ".gitignore",
        "jobs/.gitignore",
        "jobs/run.py",
        "jobs/tiny.yaml",
        "text/a.txt",
    }


def test_a_listed_upload_is_the_upload_that_ray_makes(folder: Path):
    from zipfile import ZipFile

    from ray._private.runtime_env.packaging import create_package

    write_file(folder / ".venv" / "lib" / "torch.so", 10)
    package = folder.parent / "package.zip"

    create_package(str(folder), package, include_gitignore=True, excludes=[".git", ".venv", "__pycache__"])

    with ZipFile(package) as packed:
        sizes = {Path(entry.filename): entry.file_size for entry in packed.infolist() if not entry.is_dir()}
    assert sizes == preflight.list_upload(".").sizes


def test_a_job_that_is_not_uploaded_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    upload = preflight.list_upload(".")
    assert preflight.check_job_files("jobs/tiny.yaml", upload) == Path("jobs/tiny.yaml")
    assert preflight.check_job_files(str(folder / "jobs/tiny.yaml"), upload) == Path("jobs/tiny.yaml")

    outside = tmp_path_factory.mktemp("elsewhere") / "tiny.yaml"
    outside.write_text(yaml.safe_dump(JOB))
    with pytest.raises(UserError, match=r"the job file .*tiny\.yaml lies outside of --working-dir"):
        preflight.check_job_files(str(outside), upload)

    (folder / "jobs" / "child.yaml").write_text(f"base: {outside}\n")
    with pytest.raises(UserError, match=r"base: .*tiny\.yaml lies outside of --working-dir"):
        preflight.check_job_files("jobs/child.yaml", preflight.list_upload("."))

    (folder / "ignored" / "tiny.yaml").write_text(yaml.safe_dump(JOB))
    with pytest.raises(UserError, match=r"ignored/tiny\.yaml is left out of the upload by a \.gitignore"):
        preflight.check_job_files("ignored/tiny.yaml", preflight.list_upload("."))

    with pytest.raises(UserError, match=r"--working-dir .*jobs: no jobs/run\.py in it"):
        preflight.check_job_files("jobs/tiny.yaml", preflight.list_upload("jobs"))
    with pytest.raises(UserError, match=r"--working-dir nowhere: no such folder"):
        preflight.list_upload("nowhere")


def test_an_upload_over_rays_limit_is_refused_by_the_names_of_what_is_large(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    preflight.check_size(preflight.list_upload("."))
    assert capsys.readouterr().err == ""

    write_file(folder / "old" / "models" / "a.bin", 20 * MIB)
    write_file(folder / "old" / "models" / "b.bin", 20 * MIB)
    preflight.check_size(preflight.list_upload("."))
    assert "40 MiB to upload" in (warning := capsys.readouterr().err)
    assert "old/models (40 MiB)" in warning

    write_file(folder / "dump" / "core", 70 * MIB)
    with pytest.raises(UserError, match=r"110 MiB.*takes less than 100.*dump/core \(70 MiB\), old/models \(40 MiB\)"):
        preflight.check_size(preflight.list_upload("."))


def test_nothing_or_something_else_at_the_address_is_one_sentence(folder: Path):
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}/?: no Ray cluster answers .*refused.*ray start"):
        submit.connect_dashboard(f"127.0.0.1:{port}/")
    for address in ("ray://127.0.0.1:10001", "http://", "auto://x"):
        with pytest.raises(UserError, match="want the address of a Ray dashboard"):
            submit.connect_dashboard(address)
    with pytest.raises(UserError, match="Port out of range"):
        submit.connect_dashboard("http://127.0.0.1:99999")

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="what answers is no Ray dashboard"):
            submit.connect_dashboard(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_the_address_given_wins_over_rays_variables(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://elsewhere.invalid:8265")
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}"):
        submit.connect_dashboard(f"http://127.0.0.1:{port}")

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://elsewhere.invalid:8265")
    with pytest.raises(UserError, match=r"elsewhere\.invalid:8265"):
        submit.connect_dashboard(None)


def test_relative_paths_become_the_users_own(folder: Path):
    job = [
        "jobs/tiny.yaml",
        "track.uri=sqlite:///my runs.db",
        "data.tokenizer=t.json",
        'data.corpus=["python", "text", "s3://bucket/a", "/absolute"]',
    ]
    config = load_job(job[0], [*job[1:], *preflight.absolute_paths(load_job(job[0], job[1:]), folder)])

    assert config.runs_folder == str(folder / "runs")
    assert config.data.folder == str(folder / "runs/data")
    assert config.data.tokenizer == str(folder / "t.json")
    assert config.data.corpus == ("python", str(folder / "text"), "s3://bucket/a", "/absolute")
    assert config.track.uri == f"sqlite:///{folder}/my runs.db"
    assert preflight.absolute_paths(config, folder) == []


def test_relative_paths_of_several_sources_become_the_users_own(folder: Path):
    sources = [
        {"name": "here", "corpus": ["text", "python"], "weight": 2, "only": ["Books"]},
        {"name": "there", "corpus": ["hf://datasets/a/b", "/absolute"], "weight": 0.5},
    ]
    job = ["jobs/tiny.yaml", "data.corpus=[]", f"data.sources={json.dumps(sources)}"]
    before = load_job(job[0], job[1:]).data.sources
    config = load_job(job[0], [*job[1:], *preflight.absolute_paths(load_job(job[0], job[1:]), folder)])

    assert config.data.sources == (replace(before[0], corpus=(str(folder / "text"), "python")), before[1])
    assert config.data.corpus == ()
    assert preflight.absolute_paths(config, folder) == []


def test_text_of_a_source_that_would_not_be_on_the_cluster_is_named_by_its_key(folder: Path):
    sources = [{"name": name, "corpus": [name, "python"], "weight": 1} for name in ("text", "missing", "ignored")]

    def check(*chosen: dict[str, object]) -> None:
        job = load_job("jobs/tiny.yaml", ["data.corpus=[]", f"data.sources={json.dumps(chosen)}"])
        preflight.check_corpus(job, preflight.list_upload("."))

    check(sources[0])
    with pytest.raises(UserError, match=r"^data\.sources\[1\]\.corpus: no such file, folder or glob in .*: missing"):
        check(*sources[:2])
    with pytest.raises(UserError, match=r"^data\.sources\[1\]\.corpus: .*ignored.* would not be on the cluster"):
        check(sources[0], sources[2])


def test_text_that_would_not_be_on_the_cluster_is_refused(folder: Path):
    upload = preflight.list_upload(".")

    def check(*corpus: str) -> None:
        preflight.check_corpus(load_job("jobs/tiny.yaml", [f"data.corpus={json.dumps(corpus)}"]), upload)

    check("text", "text/*.txt", "text/a.txt", "python", "s3://bucket/key", "/data/on/the/cluster")
    with pytest.raises(UserError, match=r"data\.corpus: no such file, folder or glob in .*: missing\.txt"):
        check("missing.txt")
    for entry in ("ignored", "ignored/*.txt", "ignored/deep", "../" + folder.name + "/ignored/a.txt"):
        with pytest.raises(UserError, match=r"data\.corpus: .*ignored.* would not be on the cluster"):
            check(entry)


def test_results_that_would_be_lost_on_a_cluster_are_said_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    preflight.warn_about_paths(load_job("jobs/tiny.yaml"))
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "runs_folder, data.folder: relative" in warning

    preflight.warn_about_paths(load_job("jobs/tiny.yaml", ["runs_folder=/shared", "data.folder=/shared/data"]))
    assert capsys.readouterr().err == ""


def test_a_wrong_job_never_reaches_the_cluster(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["submit", "jobs/tiny.yaml", "train.lenght=3 steps"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("tokendrop: jobs/tiny.yaml: train.lenght: unknown key")


# Whole jobs


class Head(NamedTuple):
    """A Ray head whose Python can't import tokendrop, and the environment to submit to it from."""

    address: str
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """`ray start --head` in its own folder, at its own ports."""
    temporary = Path(tempfile.mkdtemp(prefix="td", dir="/tmp"))  # Ray's sockets want a short path
    python = dependencies_alone(temporary / "venv")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PATH": f"{python.parent}{os.pathsep}{environment['PATH']}",
    }
    dashboard, agent, metrics, client, gcs = free_ports(5)
    process = subprocess.Popen(
        [
            *(
                python,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--block",
                "--no-monitor",
                "--num-cpus=3",
            ),
            *(f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
            *(f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}"),
            *("--min-worker-port=0", "--max-worker-port=0"),
            *(f"--object-store-memory={150 * MIB}", f"--temp-dir={temporary / 'ray'}"),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_for_nodes(address)
        folder = make_folder(tmp_path_factory.mktemp("user") / "my work")
        yield Head(address, folder, environment)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def dependencies_alone(folder: Path) -> Path:
    """A Python with the packages of this one, less those installed as a link to their source: tokendrop."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a line of a .pth file adds a folder, but not what the .pth files in that folder add
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(installed))
    python = folder / "bin" / "python"
    # -E: a Ray that this session started has put the source tree on PYTHONPATH
    command = [python, "-E", "-c", "import tokendrop"]
    found = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    if "No module named 'tokendrop'" not in found.stderr:
        pytest.skip("tokendrop is installed here as a copy, not with `pip install -e`")
    return python


def wait_for_nodes(address: str, timeout_s: float = 60.0) -> None:
    """Until the dashboard answers and knows of its node."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/nodes?view=summary", timeout=5) as answer:
                if json.load(answer)["data"]["summary"]:
                    return
        except (OSError, ValueError):
            pass
        time.sleep(0.3)
    raise TimeoutError(f"no Ray head at {address} after {timeout_s} s")


@pytest.mark.ray
def test_ray_job_submit_needs_nothing_but_the_dependencies(head: Head):
    command = f"python jobs/run.py train jobs/tiny.yaml data.corpus=[{json.dumps(str(head.folder / 'text'))}]"
    done = head.run(
        *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.address),
        *("--working-dir", ".", "--", *command.split(" ", 4)),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    run = Path(next(line for line in done.stdout.splitlines() if line.startswith("run folder")).split(None, 2)[2])
    assert in_job_copy(run)
    assert "the run lies in this job's temporary folder" in done.stdout
    assert read_meta(latest_checkpoint(run))["name"] == "tiny"
    assert not (head.folder / "runs").exists()


@pytest.mark.ray
def test_a_submitted_run_lies_where_the_user_is(head: Head):
    done = head.run(
        *(sys.executable, "-m", "tokendrop", "submit", "jobs/tiny.yaml", "name=mine"),
        *("--address", head.address, "--json"),
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["exit_code"]) == ("SUCCEEDED", 0)
    run = Path(result["result"]["run"])
    assert run.parent == head.folder / "runs"
    assert latest_checkpoint(run).is_dir()
    config, data = open_run_folder(run)
    assert config.name == "mine"
    assert data.is_relative_to(head.folder / "runs" / "data")
    assert "step 3/3" in done.stderr


@pytest.mark.ray
def test_a_jobs_own_exit_code_and_sentence_come_back(head: Head):
    done = head.run(
        *(
            sys.executable,
            "-m",
            "tokendrop",
            "submit",
            "jobs/tiny.yaml",
            "train.micro_batch=1",
            "scaling.workers=4",
        ),
        *("--address", head.address),
    )

    assert done.returncode == 2, done.stdout + done.stderr
    sentence = done.stdout.splitlines()[-1]
    assert sentence.startswith("tokendrop: scaling: 4 workers want 4 CPUs, this cluster has 3")


@pytest.mark.ray
def test_ctrl_c_stops_the_job_on_the_cluster(head: Head):
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tokendrop", "submit", "jobs/tiny.yaml", "train.length=100000 steps"),
            *("--address", head.address, "--json"),
        ],
        cwd=head.folder,
        env=head.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stderr is not None
        for line in following.stderr:
            if line.startswith("Running entrypoint"):
                break
        following.send_signal(signal.SIGINT)
        out, error = following.communicate(timeout=60)

    assert following.returncode == 130, error
    assert "the cluster was asked to stop the job" in error
    assert json.loads(out)["status"] == "STOPPED"
