"""Whole jobs, submitted to a head that has the dependencies alone."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from heads import Head
from tokendrop.track.run_folder import open_run_folder
from tokendrop.train.checkpoint_index import latest_checkpoint, read_meta

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"


@pytest.mark.ray
def test_ray_job_submit_needs_nothing_but_the_dependencies(head: Head):
    command = f"python jobs/run.py train jobs/tiny.yaml data.corpus=[{json.dumps(str(head.folder / 'text'))}]"
    done = head.run(
        *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.address),
        *("--working-dir", ".", "--", *command.split(" ", 4)),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    run = Path(next(line for line in done.stdout.splitlines() if line.startswith("run folder")).split(None, 2)[2])
    assert run.parent == head.results / "runs"
    assert f"results  {run.parent}; TOKENDROP_RESULTS in the environment" in done.stdout
    assert "core_worker.cc" not in done.stdout + done.stderr  # which Ray's own complaints name
    assert read_meta(latest_checkpoint(run))["name"] == "tiny"
    assert not (head.folder / "runs").exists()


@pytest.mark.ray
@pytest.mark.long
def test_files_of_the_users_own_travel_with_the_working_folder(head: Head):
    for name in ("every_other_layer", "right_to_left"):
        (head.folder / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    drop = "drop={method: every_other_layer.py:EveryOtherLayer, schedule: {kind: constant, kept: 8}}"
    train = ["train", "jobs/tiny.yaml", "name=own", drop, "task.kind=right_to_left.py:RightToLeft", "model.layers=4"]
    done = head.run(
        *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.address),
        *("--working-dir", ".", "--", "python", "jobs/run.py", *train),
        *(f"data.corpus=[{json.dumps(str(head.folder / 'text'))}]", "scaling.workers=2", "scaling.cpus_per_worker=1"),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = head.results.glob("runs/own-*/job.yaml")
    assert "every_other_layer.py:EveryOtherLayer" in job.read_text()
    assert "right_to_left.py:RightToLeft" in job.read_text()


def test_a_python_without_the_dependencies_is_told_what_to_do():
    script = Path(__file__).parents[2] / "jobs" / "run.py"
    bare = [sys.executable, "-I", "-S", script, "plan", "jobs/tiny.yaml"]  # the standard library alone
    done = subprocess.run(bare, capture_output=True, text=True, check=False)

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"tokendrop: {sys.executable} has no package yaml: run `ray start`")


@pytest.mark.ray
@pytest.mark.long
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
@pytest.mark.long
def test_a_jobs_own_exit_code_and_sentence_come_back(head: Head):
    done = head.run(
        *(sys.executable, "-m", "tokendrop", "submit", "jobs/tiny.yaml", "model.vocab_size=100"),
        *("--address", head.address),
    )

    assert done.returncode == 2, done.stdout + done.stderr
    sentence = done.stdout.splitlines()[-1]
    assert sentence.startswith("tokendrop: ")
    assert "model.vocab_size" in sentence


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
        out, error = following.communicate(timeout=300)

    assert following.returncode == 130, error
    assert "the cluster was asked to stop the job" in error
    assert json.loads(out)["status"] == "STOPPED"
