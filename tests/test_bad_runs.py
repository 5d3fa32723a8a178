"""A run that can't be started or resumed, and commands that are given what they can't use: one line, exit code 2."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkouts import free_ports
from corpora import documents, tiny_job, write_corpus
from runs import left_behind
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.track.run_folder import create_run_folder
from tokendrop.train.checkpoint_index import latest_checkpoint


@pytest.fixture
def job(tmp_path) -> Path:
    """A job that would train on a good corpus."""
    return tiny_job(tmp_path, [write_corpus(tmp_path / "good.jsonl", documents(80))])


@pytest.mark.ray
@pytest.mark.parametrize(("resource", "amount"), [("cpu", 1000), ("gpu", 1)])
def test_more_workers_than_the_cluster_could_hold_are_refused(tmp_path, ray_cluster, job, complaint, resource, amount):
    said = complaint("train", job, f"scaling.{resource}s_per_worker={amount}")
    assert re.match(rf"scaling: 1 workers want {amount} {resource.upper()}s, this cluster has \d", said)
    assert left_behind(tmp_path) == []


@pytest.mark.ray
def test_nodes_of_a_kind_that_the_cluster_has_not_are_refused(tmp_path, ray_cluster, job, complaint):
    said = complaint("train", job, "scaling.accelerator=B9000", "scaling.market=spot")
    assert said.startswith("scaling: no node of this cluster has accelerator_type:B9000, market:spot; leave ")
    assert left_behind(tmp_path) == []
    said = complaint("train", job, "scaling.accelerator=h100")
    assert said == f"{job}: scaling: want accelerator as Ray names it, such as H100, got 'h100'"


OTHER_RUNS = {
    "train.length=1 steps": r"train\.length: RUN is at step 2, this job ends at 1",
    "seed=5": r"seed: RUN began with \d+, this job has 5; want the same, or a new run",
    "train.global_batch=8": r"train\.global_batch: RUN began with 4, this job has 8",
    "data.shuffle_rows=0": r"data\.shuffle_rows: RUN began with 65536, this job has 0",
}


@pytest.mark.ray
def test_a_run_of_another_job_is_named_by_the_key_that_differs(tmp_path, ray_cluster, job, complaint):
    main(["train", str(job)])
    (run,) = (tmp_path / "runs").glob("tiny-*")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for changes, key in ((["model.width=64"], "width"), (["model.layers=3"], "layers")):
        said = complaint("train", job, "--resume", run, *changes)
        assert re.match(rf"{run}/checkpoints/step_0*2: a checkpoint of another model: model\.{key} is ", said)
    for change, expected in OTHER_RUNS.items():
        said = complaint("train", job, "--resume", run, change)
        assert re.match(expected.replace("RUN", re.escape(str(run))), said)
    other = write_corpus(tmp_path / "other.jsonl", documents(80, seed=1))
    said = complaint("train", job, "--resume", run, f"data.corpus=[{other}]")
    assert re.match(rf"data: {run} began with the token shards in \S+, this job makes others in ", said)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.long
@pytest.mark.ray
def test_a_corpus_copied_anew_is_the_same_corpus(tmp_path, ray_cluster, job):
    main(["train", str(job), "run=first"])
    corpus = tmp_path / "good.jsonl"
    os.utime(corpus, (0, 0))
    main(["train", str(job), "run=first", "train.length=3 steps"])
    assert latest_checkpoint(tmp_path / "runs" / "first").name.endswith("3")


@pytest.mark.parametrize("with_job", [True, False])
def test_a_folder_that_is_no_run_can_not_be_resumed(tmp_path, job, complaint, with_job):
    for folder in (tmp_path, tmp_path / "missing"):
        said = complaint("train", *([job] if with_job else []), "--resume", folder)
        assert said.startswith(f"{folder}: not a run folder")
    assert left_behind(tmp_path) == []


def test_a_ray_that_a_mode_does_not_work_with_is_named_before_it_is_used(job, complaint, monkeypatch):
    monkeypatch.setattr("ray.__version__", "2.61.0")
    plan = ("scaling.mode=schedule", "scaling.segments=[{from: 0%, workers: 1}]")
    wanted = "scaling.mode: 'schedule' works with Ray 2.60.*, this is Ray 2.61.0; want scaling.mode: fit_per_segment"
    assert complaint("train", job, *plan).startswith(wanted)


def test_a_folder_for_runs_that_can_not_be_made_is_named(tmp_path, job):
    (tmp_path / "file").touch()
    for run in ([], ["run=mine"]):
        config = load_job(job, [f"runs_folder={tmp_path}/file/runs", *run])
        with pytest.raises(UserError, match=rf"^runs_folder: can't make a folder below {tmp_path}/file/runs \(Not a"):
            create_run_folder(config)


@pytest.mark.parametrize(
    ("bench", "option"), [("step", "rounds"), ("step", "micro-batch"), ("elastic", "resizes"), ("elastic", "stretch")]
)
def test_a_measurement_of_nothing_is_refused(complaint, bench, option):
    assert complaint("bench", bench, f"--{option}", "0") == (
        f"--{option}: want a whole number of at least 1, got '0'; see tokendrop bench {bench} --help"
    )


@pytest.mark.ray
@pytest.mark.parametrize("command", ["prepare", "train"])
def test_a_cluster_that_is_not_there_is_named_by_its_address(tmp_path, job, command):
    (port,) = free_ports(1)
    ended = subprocess.run(
        [sys.executable, "-m", "tokendrop", command, str(job)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": f"127.0.0.1:{port}"},
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    connect, said = ended.stderr.splitlines()
    assert connect == f"connect  to the Ray cluster at 127.0.0.1:{port}"
    assert re.fullmatch(rf"tokendrop: RAY_ADDRESS: no Ray cluster lets .* at 127\.0\.0\.1:{port} .*", said)
    assert left_behind(tmp_path) == []
