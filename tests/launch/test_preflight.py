"""What is checked before a job's files are uploaded."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkouts import JOB, MIB, ROOT, free_ports
from tokendrop.cli.main import main
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.launch import preflight, submit


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


def test_a_pattern_that_git_would_not_read_is_named_by_its_file(folder: Path):
    (folder / "jobs" / ".rayignore").write_text("text\\")
    with pytest.raises(UserError, match=r"/jobs/\.rayignore: want the patterns of a \.gitignore \(Invalid"):
        preflight.list_upload(".")


def test_files_that_git_ignores_are_listed_where_ray_is_told_to_take_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    (folder / ".rayignore").write_text("/text/")
    assert set(map(str, preflight.list_upload(".").sizes)) == {
        *(".gitignore", ".rayignore", "jobs/run.py", "jobs/tiny.yaml", "ignored/a.txt", "ignored/deep/a.txt")
    }


def test_a_job_that_is_not_uploaded_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    upload, config = preflight.list_upload("."), load_job("jobs/tiny.yaml")
    assert preflight.check_job_files("jobs/tiny.yaml", config, upload) == Path("jobs/tiny.yaml")
    assert preflight.check_job_files(str(folder / "jobs/tiny.yaml"), config, upload) == Path("jobs/tiny.yaml")

    outside = tmp_path_factory.mktemp("elsewhere") / "tiny.yaml"
    outside.write_text(yaml.safe_dump(JOB))
    with pytest.raises(UserError, match=r"the job file .*tiny\.yaml lies outside of --working-dir"):
        preflight.check_job_files(str(outside), config, upload)

    (folder / "jobs" / "child.yaml").write_text(f"base: {outside}\n")
    with pytest.raises(UserError, match=r"base: .*tiny\.yaml lies outside of --working-dir"):
        preflight.check_job_files("jobs/child.yaml", config, preflight.list_upload("."))

    (folder / "ignored" / "tiny.yaml").write_text(yaml.safe_dump(JOB))
    with pytest.raises(UserError, match=r"ignored/tiny\.yaml is left out of the upload by a \.gitignore"):
        preflight.check_job_files("ignored/tiny.yaml", config, preflight.list_upload("."))

    with pytest.raises(UserError, match=r"the driver .*: no jobs/run\.py in --working-dir .*/jobs; want a checkout"):
        preflight.check_job_files("jobs/tiny.yaml", config, preflight.list_upload("jobs"))
    with pytest.raises(UserError, match=r"--working-dir nowhere: no such folder"):
        preflight.list_upload("nowhere")


def test_a_method_of_the_users_own_that_is_not_uploaded_is_refused(folder: Path):
    drop = {"schedule": {"kind": "constant", "kept": 8}, "recent": 3}
    for name in ("jobs/mine.py", "ignored/mine.py"):
        (folder / name).write_text((ROOT / "jobs/examples/every_other_layer.py").read_text())
        job = {**JOB, "drop": {"method": f"{name}:EveryOtherLayer", **drop}}
        (folder / "jobs" / "own.yaml").write_text(yaml.safe_dump(job))
        config, upload = load_job("jobs/own.yaml"), preflight.list_upload(".")
        if name.startswith("jobs"):
            preflight.check_job_files("jobs/own.yaml", config, upload)
            continue
        with pytest.raises(
            UserError, match=r"^drop\.method: .*ignored/mine\.py is left out of the upload by a \.gitign"
        ):
            preflight.check_job_files("jobs/own.yaml", config, upload)


def test_a_task_of_the_users_own_is_held_to_the_same(folder: Path):
    for name, said in (
        ("jobs/task.py", None),
        ("ignored/task.py", r"^task\.kind: .*ignored/task\.py is left out of the upload"),
        (f"{folder}/jobs/task.py", r"^task\.kind: .*jobs/task\.py: want a path from --working-dir on"),
    ):
        (folder / name).write_text((ROOT / "jobs/examples/right_to_left.py").read_text())
        (folder / "jobs" / "own.yaml").write_text(yaml.safe_dump({**JOB, "task": {"kind": f"{name}:RightToLeft"}}))
        config, upload = load_job("jobs/own.yaml"), preflight.list_upload(".")
        if said is None:
            preflight.check_job_files("jobs/own.yaml", config, upload)
            continue
        with pytest.raises(UserError, match=said):
            preflight.check_job_files("jobs/own.yaml", config, upload)


def test_an_upload_over_rays_limit_is_refused_by_the_names_of_what_is_large(folder: Path):
    write_file(folder / "old" / "models" / "a.bin", 40 * MIB)
    preflight.check_size(preflight.list_upload("."))
    write_file(folder / "dump" / "core", 70 * MIB)
    with pytest.raises(
        UserError, match=r"110 MiB.*takes less than 100.*dump/core \(70 MiB\), old/models/a.bin \(40 Mi"
    ):
        preflight.check_size(preflight.list_upload("."))


def test_nothing_or_something_else_at_the_address_is_one_sentence(folder: Path):
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}/?: no Ray cluster answers .*refused.*ray start"):
        submit.connect_dashboard(f"127.0.0.1:{port}/")
    for address in ("ray://127.0.0.1:10001", "http://", "auto://x"):
        with pytest.raises(UserError, match="want the address of a Ray dashboard"):
            submit.connect_dashboard(address)
    with pytest.raises(UserError, match=r"^--address http://\[::1: .*want http://HOST:8265$"):
        submit.connect_dashboard("http://[::1")
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
        preflight.check_read(job, preflight.list_upload("."))

    check(sources[0])
    with pytest.raises(UserError, match=r"^data\.sources\[1\]\.corpus: no such file, folder or glob: .*/missing "):
        check(*sources[:2])
    with pytest.raises(UserError, match=r"^data\.sources\[1\]\.corpus: .*ignored.* is left out of the upload"):
        check(sources[0], sources[2])


def test_text_that_would_not_be_on_the_cluster_is_refused(folder: Path):
    upload = preflight.list_upload(".")

    def check(*corpus: str) -> None:
        preflight.check_read(load_job("jobs/tiny.yaml", [f"data.corpus={json.dumps(corpus)}"]), upload)

    check("text", "text/*.txt", "text/a.txt", "python", "s3://bucket/key", "/data/on/the/cluster")
    with pytest.raises(UserError, match=r"data\.corpus: no such file, folder or glob: .*/missing\.txt"):
        check("missing.txt")
    for entry in ("ignored", "ignored/*.txt", "ignored/deep", "../" + folder.name + "/ignored/a.txt"):
        with pytest.raises(UserError, match=r"data\.corpus: .*ignored.* is left out of the upload"):
            check(entry)


def test_a_model_to_begin_with_is_a_path_of_the_users_own_or_uploaded(folder: Path):
    def job(place: str) -> ExperimentConfig:
        return load_job("jobs/tiny.yaml", [f"model.init_from={place}"])

    assert f'model.init_from="{folder}/text"' in preflight.absolute_paths(job("text"), folder)
    assert not any("init_from" in one for one in preflight.absolute_paths(job("openai-community/gpt2"), folder))
    upload = preflight.list_upload(".")
    for place in ("text", "openai-community/gpt2", "/on/the/cluster", "~/runs/mine"):
        preflight.check_read(job(place), upload)
    for place in ("ignored", "ignored/deep", f"../{folder.name}"):
        with pytest.raises(UserError, match=rf"^model\.init_from: {place} is on this machine and not in the upload"):
            preflight.check_read(job(place), upload)


def test_results_that_would_be_lost_on_a_cluster_are_said_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    preflight.warn_about_paths(load_job("jobs/tiny.yaml"))
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "runs_folder, data.folder: relative" in warning
    preflight.warn_about_paths(load_job("jobs/tiny.yaml", ["track.uri=sqlite:///runs.db"]))
    assert "runs_folder, data.folder, track.uri: relative" in capsys.readouterr().err

    preflight.warn_about_paths(load_job("jobs/tiny.yaml", ["runs_folder=/shared", "data.folder=/shared/data"]))
    assert capsys.readouterr().err == ""


def test_a_wrong_job_never_reaches_the_cluster(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["submit", "jobs/tiny.yaml", "train.lenght=3 steps"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("tokendrop: jobs/tiny.yaml: train.lenght: unknown key")


SECRET = "https://user:password@host"


def test_a_secret_is_not_put_on_a_jobs_command_line(folder: Path, complaint):
    said = complaint("submit", "jobs/tiny.yaml", f"track.uri={SECRET}")
    assert said.startswith(
        "track.uri: its secret would be seen in Ray's dashboard, in the job's command; want it in the"
        " environment of the cluster's nodes"
    )
    assert "MLFLOW_TRACKING_PASSWORD" in said
    config = load_job("jobs/tiny.yaml", ["data.corpus=[text/*, s3://key:secret@bucket/x.jsonl]"])
    with pytest.raises(UserError, match=r"^data\.corpus: its secret would be seen in Ray's dashboard"):
        preflight.check_secrets(preflight.absolute_paths(config, folder))
    preflight.check_secrets(["data.corpus=[s3://bucket/x.jsonl]", "track.uri=https://host"])
