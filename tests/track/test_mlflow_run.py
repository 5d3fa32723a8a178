"""What MLflow's pages are drawn from: the kind of the experiment, true times, source, user, commit and data set."""

import getpass
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run

from tokendrop.cli.main import main
from tokendrop.track.environment import describe_driver, describe_workers
from tokendrop.track.journal import METRICS, recorded_span
from tokendrop.track.mlflow import STATE, MlflowMirror
from tokendrop.track.mlflow_run import COMMAND, KIND, TRAINING
from tokendrop.track.run_folder import DATA, ENVIRONMENT
from tokendrop.train.sealed import seal_text
from track.test_mlflow import run_folder, train_on

BEGUN, ENDED = 1_700_000_000.25, 1_700_000_026.75  # 26.5 s, long ago
SHARDS = "/data/shards/0123456789abcdef"


def in_the_past(folder: Path) -> None:
    """Its record as it would have been written from BEGUN to ENDED."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines() if line]
    for number, line in enumerate(lines):
        line["time"] = BEGUN + (ENDED - BEGUN) * number / (len(lines) - 1)
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_of(uri: str, folder: Path) -> Run:
    return MlflowClient(uri).get_run(json.loads((folder / STATE).read_text())["run_id"])


@pytest.mark.parametrize("known_before", [False, True])
def test_a_run_that_is_synced_later_has_the_times_of_its_record(
    tmp_path: Path, sqlite: str, capsys: pytest.CaptureFixture[str], known_before: bool
) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    (folder / DATA).write_text(seal_text(f"{SHARDS}\n"))
    train_on(folder, range(1, 9), commit=8)
    in_the_past(folder)
    if known_before:
        MlflowMirror(folder, config).sync("RUNNING")
    (folder / STATE).write_text(json.dumps({**_state(folder), "status": "FINISHED"}))  # its server was away
    main(["sync", str(folder)])
    assert "has everything" in capsys.readouterr().out
    info = run_of(sqlite, folder).info
    assert (info.status, info.start_time, info.end_time) == ("FINISHED", BEGUN * 1000, ENDED * 1000)


def _state(folder: Path) -> dict[str, object]:
    path = folder / STATE
    return json.loads(path.read_text()) if path.exists() else {}


def test_a_run_that_goes_on_ends_later(tmp_path: Path, sqlite: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    train_on(folder, range(1, 5), commit=4)
    in_the_past(folder)
    MlflowMirror(folder, config).sync("FAILED")
    assert run_of(sqlite, folder).info.end_time == ENDED * 1000
    train_on(folder, range(5, 9), commit=8)
    MlflowMirror(folder, config).sync("RUNNING")
    MlflowMirror(folder, config).sync("FINISHED")
    info = run_of(sqlite, folder).info
    assert info.start_time == BEGUN * 1000
    assert (info.end_time or 0) > ENDED * 1000


@given(st.lists(st.floats(1e9, 2e9), min_size=1, max_size=400), st.integers(0, 3000), st.booleans())
def test_the_span_of_a_record_is_that_of_its_lines_however_many_these_are(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], width: int, torn: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    times.sort()
    lines = [json.dumps({"lost": "x" * width, "time": one}) + "\n" for one in times]
    (folder / METRICS).write_text("".join(lines) + '{"step": 3, "ti' * torn)
    assert recorded_span(folder) == (times[0], times[-1])


def test_a_run_that_has_not_begun_has_no_span(tmp_path: Path) -> None:
    assert recorded_span(tmp_path) is None
    (tmp_path / METRICS).write_text("\n")
    assert recorded_span(tmp_path) is None


def kind_of(uri: str, name: str) -> str | None:
    experiment = MlflowClient(uri).get_experiment_by_name(name)
    assert experiment is not None
    return experiment.tags.get(KIND)


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, TRAINING), ({}, TRAINING), ({KIND: "genai_development"}, "genai_development")],
    ids=["new", "unmarked", "marked by somebody"],
)
def test_an_experiment_is_marked_as_training_unless_it_is_marked(tmp_path: Path, sqlite: str, before, after) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    if before is not None:
        MlflowClient(sqlite).create_experiment(config.track.experiment, tags=before)
    MlflowMirror(folder, config).sync()
    assert kind_of(sqlite, config.track.experiment) == after


def test_mlflows_page_knows_the_kind() -> None:
    """Its JavaScript compares with it; no constant of MLflow's Python has it."""
    import mlflow

    scripts = (Path(mlflow.__file__).parent / "server" / "js" / "build").rglob("*.js")
    texts = [path.read_text() for path in scripts]
    for word in (KIND, TRAINING):
        assert any(f'"{word}"' in text for text in texts)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The working directory is a checkout; its commit."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    return subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_a_run_says_who_trained_what_with_which_code(
    tmp_path: Path, sqlite: str, checkout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = run_folder(tmp_path, sqlite, "track.tags={mlflow.note.content: mine}")
    secret = "track.uri=https://me:Geheim123@host"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tokendrop", "train", "jobs/gpt.yaml", secret, "scaling.profile=a.yaml"])
    describe_driver(folder / ENVIRONMENT)
    describe_workers(folder / ENVIRONMENT, {"type": "cpu"})  # which come from nowhere themselves
    monkeypatch.setattr(sys, "argv", ["tokendrop", "sync", "runs/x"])
    MlflowMirror(folder, config).sync()
    tags = run_of(sqlite, folder).data.tags
    assert tags["mlflow.source.name"] == "jobs/gpt.yaml"
    assert tags["mlflow.source.type"] == "LOCAL"
    assert tags["mlflow.user"] == getpass.getuser() == run_of(sqlite, folder).info.user_id
    assert tags["mlflow.source.git.commit"] == checkout
    assert tags["mlflow.note.content"] == "mine"
    assert tags[COMMAND].startswith("tokendrop train jobs/gpt.yaml ")
    for text in (*tags.values(), (folder / ENVIRONMENT).read_text()):
        assert "Geheim123" not in text


@pytest.mark.parametrize("content", ["{", "[]", '{"origin": 3}', '{"origin": {"user": 3}}', "{}"])
def test_a_run_of_which_nothing_is_known_has_no_such_tags(tmp_path: Path, sqlite: str, content: str) -> None:
    folder, config = run_folder(tmp_path, sqlite)
    (folder / ENVIRONMENT).write_text(content)
    MlflowMirror(folder, config).sync()
    tags = run_of(sqlite, folder).data.tags
    assert {key for key in tags if key.startswith("mlflow.")} == {"mlflow.runName"}


def test_a_run_names_the_token_shards_that_it_trains_on(tmp_path: Path, sqlite: str) -> None:
    corpora = "[s3://key:Geheim123@pile/train.jsonl, /data/books]"
    folder, config = run_folder(tmp_path, sqlite, f"data.corpus={corpora}")
    (folder / DATA).write_text(seal_text(f"{SHARDS}\n# tokenizer.json sha256 0\n"))
    for _ in range(2):
        MlflowMirror(folder, config).sync()
        (folder / STATE).unlink()  # all is sent again
    MlflowMirror(folder, config).sync()
    (given_,) = run_of(sqlite, folder).inputs.dataset_inputs
    assert (given_.dataset.name, given_.dataset.digest) == ("train.jsonl, books", "0123456789abcdef")
    assert json.loads(given_.dataset.source) == {"uri": SHARDS}
    assert [(tag.key, tag.value) for tag in given_.tags] == [("mlflow.data.context", "training")]
