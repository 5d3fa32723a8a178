"""A run that S3 keeps: from there it goes on, bit for bit, on a machine that has nothing of it."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from kills import Command
from runs import config_of, losses, write_job
from stores import S3, SLOW_DOWN, by_chance
from tokendrop.errors import StorageError
from tokendrop.launch.train_loop import fit_in_this_process
from tokendrop.launch.trainer import run_training
from tokendrop.track import run_home
from tokendrop.track.audit import audit
from tokendrop.track.run_copy import copied_run
from tokendrop.track.run_files import committed_in
from tokendrop.track.run_home import RunHome
from tokendrop.track.run_store import RunStore

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """The folder of this test's runs in S3, whose content is that of the process."""
    return f"bucket/{tmp_path.name}"


def committed_step(address: str) -> int:
    """Of a run, as the store tells it."""
    return max(committed_in(RunStore(address).files("checkpoints")), default=0)


def on_another_machine(tmp_path: Path, address: str) -> Path:
    """A run as one gets it that has nothing of it."""
    shutil.rmtree(tmp_path / "here")
    return copied_run(address)


def test_a_run_in_a_store_that_is_slow_and_throttles_is_that_of_a_folder(tmp_path: Path, s3: S3, runs: str) -> None:
    job, fails = write_job(tmp_path), by_chance(0.2, seed=0)
    here = Path(run_training(config_of(job), fit=fit_in_this_process)["run"])

    def trouble(method: str, path: str) -> tuple[str, bytes] | None:
        time.sleep(random.random() / 20)
        return ("503 Slow Down", SLOW_DOWN) if fails() else None

    s3.app.trouble = trouble
    in_store = config_of(job, f"runs_folder={s3.uri(runs)}", "run=one")
    result = run_training(in_store, fit=fit_in_this_process)
    assert result["address"] == s3.uri(f"{runs}/one")
    far = on_another_machine(tmp_path, s3.uri(f"{runs}/one"))
    assert losses(far) == losses(here)
    assert audit(far).is_clean
    assert run_training(in_store, fit=fit_in_this_process)["steps"] == 12  # it is done


def test_where_the_store_fails_for_long_the_run_ends_with_what_is_committed(
    tmp_path: Path, s3: S3, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_home, "_PATIENCE_S", 0.5)
    job = write_job(tmp_path)
    in_store = config_of(job, f"runs_folder={s3.uri(runs)}", "run=one")

    def trouble(method: str, path: str) -> tuple[str, bytes] | None:
        is_out = method in ("PUT", "POST") and "step_000000009" in path
        return ("503 Slow Down", SLOW_DOWN) if is_out else None

    s3.app.trouble = trouble
    with pytest.raises(StorageError, match=r"can't write .*step_000000009.*; what is committed there stays"):
        run_training(in_store, fit=fit_in_this_process)
    assert committed_step(s3.uri(f"{runs}/one")) == 6
    s3.app.trouble = lambda method, path: None
    shutil.rmtree(tmp_path / "here")
    far = Path(run_training(in_store, fit=fit_in_this_process)["run"])
    assert losses(far) == losses(Path(run_training(config_of(job), fit=fit_in_this_process)["run"]))
    assert audit(far).is_clean


@pytest.mark.parametrize(("workers", "is_saving"), [(1, True), (2, False)])
def test_killed_and_with_its_folder_lost_a_run_goes_on_from_the_store(
    tmp_path: Path, s3: S3, runs: str, workers: int, is_saving: bool
) -> None:
    job, size, address = write_job(tmp_path), f"scaling.workers={workers}", s3.uri(f"{runs}/one")
    here = Path(run_training(config_of(job, size), fit=fit_in_this_process if workers == 1 else None)["run"])
    settings = (size, f"runs_folder={s3.uri(runs)}", "run=one", f"data.folder={tmp_path}/data")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    saving = "checkpoints/step_000000009/"

    def trouble(method: str, path: str) -> None:
        time.sleep(0.1 if method == "PUT" and saving in path else 0)

    def is_time_to_die() -> bool:
        if is_saving:  # and has not committed yet
            return any(file.startswith(saving) for file in s3.files(f"{runs}/one"))
        return committed_step(address) >= 6

    s3.app.trouble = trouble
    with Command("train", job, *settings, environment=environment) as command:
        assert command.until(is_time_to_die, "the moment of its death")
        command.kill_all()
    assert committed_step(address) in (6, 9)
    shutil.rmtree(tmp_path / "here")
    with Command("train", "--resume", address, environment=environment) as command:
        command.finish()
    assert f"run folder  {address}" in command.said()
    far = on_another_machine(tmp_path, address)
    assert losses(far) == losses(here)
    assert audit(far).is_clean


def test_commands_take_the_address_of_a_run(tmp_path: Path, s3: S3, runs: str) -> None:
    from tokendrop.cli.main import main  # as a command line, in this process

    job = write_job(tmp_path)
    run_training(config_of(job, f"runs_folder={s3.uri(runs)}", "run=one"), fit=fit_in_this_process)
    shutil.rmtree(tmp_path / "here")
    address, page = s3.uri(f"{runs}/one"), tmp_path / "page.html"
    for command in (
        ("runs", s3.uri(runs)),
        ("runs", "show", address),
        ("report", address, "--to", page),
        ("data", "audit", address),
        ("evaluate", address),
        ("export", address, "--to", tmp_path / "exported"),
        ("generate", address, "--prompt", "word1", "--tokens", "2"),
    ):
        main([str(word) for word in command])
    assert page.stat().st_size > 0
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"]
    evaluations = {file for file in s3.files(f"{runs}/one") if file.startswith("evaluations/")}
    assert {file.rpartition("/")[2] for file in evaluations} >= {"result.json"}
    assert RunHome(copied_run(address)).committed_step() == 12
