"""A finished run's model in MLflow's registry: once, as something that others can load."""

import shutil
from pathlib import Path

import mlflow
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkouts import free_ports
from servers import server
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.config.run import TrackConfig
from tokendrop.errors import UserError
from tokendrop.evaluate.load import load_run
from tokendrop.evaluate.register import register_run, register_trained
from tokendrop.track.journal import METRICS
from tokendrop.track.mlflow import STATE, MlflowMirror
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.sealed import seal_text

NAME = "tiny gpt (ltd)"
QUICKSTART = Path(__file__).parents[2] / "jobs" / "pretrain" / "quickstart.yaml"


def finished_run(tiny_run: Path, to: Path, uri: str, *, steps: int = 7) -> Path:
    """A copy of the run, as if it had been as long as its checkpoint says, and were to be registered."""
    run = shutil.copytree(tiny_run, to / "own")
    (run / METRICS).touch()
    job = yaml.safe_load((run / "job.yaml").read_text())
    job["train"]["length"] = f"{steps} steps"
    job["track"] |= {"uri": uri, "register": NAME}
    (run / "job.yaml").write_text(seal_text(yaml.safe_dump(job)))
    return run


def versions(uri: str) -> list[tuple[str, str | None]]:
    return [(str(one.version), one.run_id) for one in MlflowClient(uri).search_model_versions(f'name = "{NAME}"')]


@pytest.mark.parametrize("at", ["file", pytest.param("server", marks=pytest.mark.long)])
def test_a_registered_model_is_one_that_others_load(tiny_run: Path, tmp_path: Path, capsys, monkeypatch, at) -> None:
    monkeypatch.chdir(tmp_path)
    if at == "file":
        check_registered(tiny_run, tmp_path, f"sqlite:///{tmp_path}/mlflow.db", capsys)
        return
    (port,) = free_ports(1)
    with server(tmp_path, port):
        check_registered(tiny_run, tmp_path, f"http://127.0.0.1:{port}", capsys)


def check_registered(tiny_run: Path, tmp_path: Path, uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tiny_run, tmp_path, uri)
    main(["sync", str(run)])
    assert capsys.readouterr().out.endswith(f"has everything; its model is version 1 of {NAME}\n")
    assert not list(run.glob(".export-*"))
    mlflow.set_tracking_uri(uri)
    try:
        folder = mlflow.artifacts.download_artifacts(f"models:/{NAME}/1", dst_path=str(tmp_path / "loaded"))
    finally:
        mlflow.set_tracking_uri(None)
    model, tokenizer, _ = load_run(run)
    ids_BS = torch.randint(model.config.vocab_size, (2, 16))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids_BS).logits
        torch.testing.assert_close(theirs, model.logits(ids_BS), atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).encode("the old bird") == tokenizer.encode("the old bird").ids

    assert register_run(run) == "1"
    state = (run / STATE).read_text()
    (run / STATE).unlink()  # whether it was registered is asked of MLflow then
    assert register_run(run) == "1"
    assert versions(uri) == [("1", MlflowMirror(run, open_run_folder(run)[0]).run_id)]
    assert f'"run_id": "{versions(uri)[0][1]}"' in state


def test_another_run_becomes_another_version(tiny_run: Path, tmp_path: Path, sqlite: str) -> None:
    runs = [finished_run(tiny_run, tmp_path / place, sqlite) for place in ("a", "b")]
    assert [register_run(run) for run in runs] == ["1", "2"]


def test_a_run_that_has_not_ended_is_not_registered(tiny_run: Path, tmp_path: Path, sqlite: str) -> None:
    assert register_run(finished_run(tiny_run, tmp_path, sqlite, steps=10)) is None
    assert versions(sqlite) == []


def test_training_does_not_fail_by_a_registry_that_is_away(tiny_run: Path, tmp_path: Path, capsys) -> None:
    run = finished_run(tiny_run, tmp_path, "http://127.0.0.1:9")
    register_trained(run)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "mlflow" in line]
    assert line.startswith("mlflow   the model is not registered (")
    assert f"`tokendrop sync {run}` tries it again" in line


@given(st.text(max_size=300))
def test_a_name_is_taken_where_mlflow_takes_it(name: str) -> None:
    refused = not name.strip() or name in (".", "..") or "/" in name or ":" in name or len(name) > 250
    if refused:
        with pytest.raises(ValueError, match="register: want"):
            TrackConfig(register=name)
    else:
        assert TrackConfig(register=name).register == name


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["track.register=a/b"], "track.register: want the name of a model, without '/' and ':', got 'a/b'"),
        (["track.register=''"], "track.register: want the name of a model, without '/' and ':', got ''"),
        (["track.register=a", "track.uri=null"], "track.register: uri is null, so no MLflow"),
        (["track.register=a", "drop={method: mixture_of_depths}"], "track.register: drop.method 'mixture"),
    ],
)
def test_what_can_not_be_registered_is_said_when_the_job_is_read(overrides: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job(QUICKSTART, overrides)
    assert complaint in str(caught.value)
