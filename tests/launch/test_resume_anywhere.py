"""A run begun in one folder goes on from any other, without its corpus, on shards that nothing is written to."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import yaml
from mlflow import MlflowClient

from checkouts import JOB
from corpora import byte_tokenizer, documents, write_corpus
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.data.read.row_reader import FAILED
from tokendrop.errors import DamagedDataError
from tokendrop.launch.results import RESULTS, with_absolute_paths
from tokendrop.launch.resume import shards_at_hand
from tokendrop.track.mlflow import absolute_uri
from tokendrop.track.run_folder import ENVIRONMENT, open_run_folder
from tokendrop.track.run_folder import JOB as JOB_FILE

FROM_ITS_FOLDER = ("track.uri=sqlite:///mlflow.db", "data.tokenizer=tokenizer.json", "run=mine")


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies in a folder, with what changes when it is written to."""
    found = {path.name: path.stat() for path in [folder, *folder.iterdir()]}
    return {name: (one.st_ino, one.st_mtime_ns) for name, one in found.items()}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job all of whose paths are relative; the current one."""
    folder = tmp_path / "user"
    write_corpus(folder / "text" / "a.jsonl", documents(200))
    byte_tokenizer(folder / "tokenizer.json")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(JOB))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


@pytest.fixture
def read_only() -> Iterator[list[Path]]:
    """Folders that the test made read-only, to be removed afterwards."""
    folders: list[Path] = []
    yield folders
    for folder in folders:
        folder.chmod(0o755)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_goes_on_from_another_folder_without_its_corpus_and_on_shards_that_stay_as_they_are(
    user: Path, elsewhere: Path, read_only: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["train", "tiny.yaml", *FROM_ITS_FOLDER, "drop.schedule.until=2 steps"])
    run = user / "runs" / "mine"
    _, shards = open_run_folder(run)
    monkeypatch.chdir(elsewhere)
    shutil.rmtree(user / "text")
    (user / "tokenizer.json").unlink()
    (shards / ".lock").unlink()
    shards.chmod(0o555)
    read_only.append(shards)
    before = contents(shards)

    main(["train", "--resume", str(run), "train.length=5 steps"])

    assert contents(shards) == before
    workers = json.loads((run / ENVIRONMENT).read_text())["workers"]
    assert workers["device"]["type"] == "cpu"
    assert workers["packages"]["ray"] == ray.__version__
    assert list(elsewhere.iterdir()) == []
    assert open_run_folder(run)[1] == shards
    client = MlflowClient(f"sqlite:///{user}/mlflow.db")
    (tracked,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert [point.step for point in client.get_metric_history(tracked.info.run_id, "loss/train")] == [1, 2, 3, 4, 5]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_shards_may_be_moved_are_used_by_other_runs_and_what_lacks_is_named(
    user: Path, elsewhere: Path, read_only: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["train", "tiny.yaml", *FROM_ITS_FOLDER, "train.length=1 step"])
    run, job = user / "runs" / "mine", user / "runs" / "mine" / JOB_FILE
    _, shards = open_run_folder(run)
    (shards / FAILED).write_text("of an earlier job")
    (shards / ".lock").unlink()
    main(["prepare", "tiny.yaml", *FROM_ITS_FOLDER])
    assert not (shards / ".lock").exists()
    assert not (shards / FAILED).exists()

    moved = shards.rename(elsewhere / shards.name)
    monkeypatch.chdir(elsewhere)
    assert shards_at_hand(load_job(job), run) is None
    assert shards_at_hand(load_job(job, [f"data.folder={elsewhere}"]), run) == moved
    assert shards_at_hand(load_job(job, [f"data.folder={elsewhere}", "data.corpus=[other]"]), run) is None
    assert shards_at_hand(load_job(job, [f"data.folder={elsewhere}", "data.tokenizer=null"]), run) is None
    for change in (
        *("data.text_unit=line", "data.end_of_text=false", "data.text_key=body", "data.validation_share=0.3"),
        *("data.tsv_header=false", "data.rows_per_shard=9", "model.sequence_length=16"),
    ):
        assert shards_at_hand(load_job(job, [f"data.folder={elsewhere}", change]), run) is None, change
    assert shards_at_hand(load_job(job, [f"data.folder={elsewhere}", "data.reader=ray_data"]), run) == moved
    lost = next(moved.glob("*train*.arrow"))
    lost.unlink()
    with pytest.raises(DamagedDataError, match=lost.name):
        shards_at_hand(load_job(job, [f"data.folder={elsewhere}"]), run)


def test_every_path_of_a_job_means_the_same_from_any_folder(user: Path, elsewhere: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    corpus = "data.corpus=[text/*, ~/more, python, 's3://bucket/x', /data/y]"
    config = with_absolute_paths(load_job("tiny.yaml", [corpus, "runs_folder=~/runs", "data.tokenizer=tokenizer.json"]))
    assert config.data.corpus == (f"{user}/text/*", f"{elsewhere}/more", "python", "s3://bucket/x", "/data/y")
    assert config.data.tokenizer == f"{user}/tokenizer.json"
    assert config.runs_folder == f"{elsewhere}/runs"
    monkeypatch.chdir(elsewhere)
    assert with_absolute_paths(config) == config
    sources = "data.sources=[{name: a, corpus: [text], weight: 1}]"
    of_sources = with_absolute_paths(load_job(user / "tiny.yaml", ["data.corpus=[]", sources]))
    assert of_sources.data.sources[0].corpus == (f"{elsewhere}/text",)


def test_a_submitted_job_reads_in_the_copy_that_each_node_has(user: Path, tmp_path: Path, monkeypatch) -> None:
    copy = tmp_path / "working_dir_files" / "_ray_pkg_0"
    shutil.copytree(user, copy)
    monkeypatch.chdir(copy)
    config = with_absolute_paths(load_job("tiny.yaml", ["data.tokenizer=tokenizer.json"]))
    assert (config.data.corpus, config.data.tokenizer) == (("text/*",), "tokenizer.json")
    monkeypatch.setenv(RESULTS, str(tmp_path / "results"))
    for name in ("text", "runs/mine"):
        (tmp_path / "results" / name).mkdir(parents=True)
    for place, meant in (("text", "text"), ("runs/mine", f"{tmp_path}/results/runs/mine"), ("a/hub", "a/hub")):
        config = with_absolute_paths(load_job("tiny.yaml", [f"model.init_from={place}"]))
        assert config.model.init_from == meant
    assert os.path.isabs(config.runs_folder)


@pytest.mark.parametrize(
    ("uri", "meant"),
    [
        ("sqlite:///mlflow.db", "sqlite:////f/mlflow.db"),
        ("sqlite:///../x/mlflow.db", "sqlite:////f/../x/mlflow.db"),
        ("sqlite:////a/mlflow.db", "sqlite:////a/mlflow.db"),
        ("mlruns", "/f/mlruns"),
        ("./mlruns", "/f/mlruns"),
        ("/a/mlruns", "/a/mlruns"),
        ("file:mlruns", "file:/f/mlruns"),
        ("file:///a/mlruns", "file:///a/mlruns"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
        (None, None),
    ],
)
def test_a_tracking_uri_means_the_same_from_any_folder(uri: str | None, meant: str | None) -> None:
    assert absolute_uri(uri, Path("/f")) == meant
    assert absolute_uri(meant, Path("/other")) == meant
