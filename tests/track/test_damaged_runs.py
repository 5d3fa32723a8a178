"""A run folder of which a file was cut, changed, lost or added: what was written is read, or one sentence names it."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from ledgers import BATCH, Run, make_run, report
from mutations import KINDS, flip_bit, mutations, truncate
from tiny import experiment
from tokendrop.cli.main import main
from tokendrop.config.task import CausalLm, perplexity
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.track.audit import audit
from tokendrop.track.journal import LEDGER, METRICS, STEPS, Journal, MetricsTail, read_steps
from tokendrop.track.mlflow import _points
from tokendrop.track.run_folder import (
    DATA,
    JOB,
    PLAN,
    check_model,
    describe_run,
    open_run_folder,
    summarize,
    tokenizer_of,
)
from tokendrop.train.checkpoint_index import META, step_name, write_meta


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> Path:
    """A run folder as training describes it, nothing trained yet; its tests leave it as it is."""
    data, run = (tmp_path_factory.mktemp(name) for name in ("data", "run"))
    (data / "tokenizer.json").write_text('{"model": {}}')
    describe_run(run, experiment(), data)
    return run


@pytest.fixture
def run(tmp_path) -> Run:
    """12 steps with checkpoints of 3, 6, 9 and 12; of all of it, the models alone are not there."""
    made = make_run(tmp_path / "run")
    made.attempt(2, start=0)
    assert audit(made.folder).is_clean
    return made


def what_comes_of(look: Callable[[], Any]) -> tuple[Any, UserError | None]:
    """What it gives, or what it says in its place."""
    try:
        return look(), None
    except UserError as error:
        return None, error


def test_what_describes_a_run_is_read_back_and_is_for_people_too(described) -> None:
    config, data = open_run_folder(described)
    assert (config, data / "tokenizer.json") == (experiment(), data / "tokenizer.json")
    assert tokenizer_of(described) == described / "tokenizer.json"
    assert (described / JOB).read_text().startswith("name: tiny\n")
    assert (described / DATA).read_text().startswith(f"{data}\n")
    plan = json.loads((described / PLAN).read_text())
    assert len(plan["segments"]) == len(config.plan.segments)
    assert "spans" in plan["routes"]
    assert "routes" not in plan["segments"][0]


@given(mutations())
@settings(max_examples=80, derandomize=True)
def test_a_run_is_what_it_was_or_named_as_damaged(described, tmp_path_factory, mutation) -> None:
    folder = Path(shutil.copytree(described, tmp_path_factory.mktemp("damaged") / "run"))
    path = mutation.strike(folder)
    found, said = what_comes_of(lambda: (*open_run_folder(folder), tokenizer_of(folder).read_bytes()))
    if said is None:
        assert found == (*open_run_folder(described), tokenizer_of(described).read_bytes())
    else:
        assert str(folder) in str(said)
        assert "\n" not in str(said)
        assert said.exit_code == (1 if path.exists() else 2)


def test_a_job_cut_in_half_is_no_other_job(described, tmp_path, capsys) -> None:
    """It would be one: what is left of the file is a job that drops nothing."""
    for command in (["train", "--resume"], ["data", "audit"], ["sync"]):
        folder = shutil.copytree(described, tmp_path / command[-1])
        text = (folder / JOB).read_text()
        (folder / JOB).write_text(text[: text.index("drop:")])
        with pytest.raises(SystemExit) as ended:
            main([*command, str(folder)])
        assert ended.value.code == 1
        said = capsys.readouterr().err
        assert said.startswith(f"tokendrop: {folder}/job.yaml: damaged (it ends without a checksum); want ")
        assert said.count("\n") == 1
    with pytest.raises(DamagedDataError):
        summarize(folder)


def test_files_of_a_run_are_made_as_the_users_umask_wants_them(described, tmp_path) -> None:
    before = os.umask(0o027)
    try:
        folder = tmp_path / "run"
        folder.mkdir()
        describe_run(folder, experiment(), open_run_folder(described)[1])
        journal = Journal(folder, rank=0, world_size=1, start=0)
        journal.commit(1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o640}
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_dir()} == {0o750}


def test_a_run_falls_back_with_its_record_to_the_checkpoint_before(run) -> None:
    """The steps after it are done again, so that none is missing and none is there twice."""
    truncate(run.folder / "checkpoints" / step_name(12) / META, 0.5)
    assert audit(run.folder).steps == 9
    shutil.rmtree(run.folder / "checkpoints" / step_name(12))
    run.attempt(4, start=9)
    found = audit(run.folder)
    assert (found.steps, found.samples, found.is_clean) == (12, 12 * BATCH, True)
    assert [row["step"] for row in read_steps(run.folder)] == list(range(1, 13))


@pytest.mark.parametrize("name", ["notes.parquet", "a-b-rank0.parquet", "000000009-000000003-rank0.parquet", "x.txt"])
def test_files_that_are_no_part_of_the_record_are_left_out_and_left_alone(run, capsys, name) -> None:
    expected = read_steps(run.folder)
    for dataset in (STEPS, LEDGER):
        (run.folder / dataset / name).write_text("notes")
    Journal(run.folder, rank=0, world_size=1, start=12)
    assert (run.folder / STEPS / name).exists()
    capsys.readouterr()
    assert read_steps(run.folder) == expected
    assert capsys.readouterr().err.startswith(f"note     {run.folder}/{STEPS}/{name}: left out, ")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("delete", "duplicate")])
@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.97])
def test_a_damaged_part_of_the_record_is_named(run, kind, where) -> None:
    part = run.folder / STEPS / "000000003-000000006-rank0.parquet"
    expected = read_steps(run.folder)
    KINDS[kind](part, where)
    found, said = what_comes_of(lambda: read_steps(run.folder))
    if said is None:
        assert found == expected
    else:
        assert said.exit_code == 1
        assert str(said).startswith(f"{part}: this part of the steps is damaged (")
        assert "\n" not in str(said)


def test_a_number_that_has_changed_in_the_record_is_found(run) -> None:
    """Parquet by itself does not look."""
    part = run.folder / STEPS / "000000003-000000006-rank0.parquet"
    loss = b"\x00\x00\x00\x00\x00\x00\xf0\x3f"  # 1.0, as `ledgers.report` has it
    content = part.read_bytes()
    assert loss in content
    part.write_bytes(content.replace(loss, loss[::-1]))
    with pytest.raises(DamagedDataError, match="this part of the steps is damaged"):
        read_steps(run.folder)


def test_a_record_that_lacks_steps_is_no_summary(run) -> None:
    assert summarize(run.folder)["steps"] == 12
    (run.folder / STEPS / "000000003-000000006-rank0.parquet").unlink()
    with pytest.raises(DamagedDataError, match=r"want each step from 1 on, found 9 of them$"):
        summarize(run.folder)
    shutil.rmtree(run.folder / STEPS)
    for _ in range(2):
        with pytest.raises(DamagedDataError, match=r"steps\.parquet: damaged; want each step from 1 on, found 0"):
            summarize(run.folder)
        (run.folder / STEPS).mkdir(exist_ok=True)


def test_a_loss_that_is_too_large_for_its_perplexity_is_recorded(run) -> None:
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert perplexity(2.0) == math.exp(2.0)
    part = run.folder / STEPS / "000000009-000000012-rank0.parquet"
    table = pq.read_table(part)
    losses = pa.array([1e4] * len(table), pa.float64())
    pq.write_table(table.set_column(table.schema.get_field_index("val_loss"), "val_loss", losses), part)
    assert summarize(run.folder)["val_perplexity"] == math.inf
    line = {**asdict(report(1, 1)), "val_loss": 1e4}
    assert ("quality/perplexity", math.inf) in [point[:2] for point in _points([line], CausalLm())]


@pytest.mark.parametrize(
    "line",
    [
        "5",
        "null",
        '"step"',
        '["step"]',
        '{"step": 3}',
        '{"step": {}, "loss": 1}',
        '{"attempt_from": 3}',
        '{"resize_at": 3, "from": 1, "to": 2, "pause_s": 1, "parts_s": {"a": "b"}}',
        '{"paused_at": 3, "world_size": null, "checkpoint_s": 1, "time": 1}',
        "[" * 10**5,
    ],
)
def test_lines_that_nobody_wrote_are_skipped(run, line) -> None:
    before = MetricsTail(run.folder).read(limit=-1)
    with (run.folder / METRICS).open("a") as file:
        file.write(f"{line}\n")
    assert MetricsTail(run.folder).read(limit=-1) == before
    assert summarize(run.folder)["steps"] == 12


def test_a_checkpoint_of_another_model_is_named(tmp_path) -> None:
    config = experiment()
    for model, key in (
        ({**asdict(config.model), "width": 99}, "width"),
        ({}, "layers"),
        (None, "layers"),
        (3, "layers"),
    ):
        checkpoint = tmp_path / step_name(3)
        checkpoint.mkdir(exist_ok=True)
        write_meta(checkpoint, {"step": 3, "model": model}, {})
        with pytest.raises(UserError, match=rf"^{checkpoint}: a checkpoint of another model: model\.({key}) is "):
            check_model(checkpoint, config)
    write_meta(checkpoint, {"step": 3, "model": {**asdict(config.model), "preset": "another name"}}, {})
    check_model(checkpoint, config)


def test_flipping_any_bit_of_the_place_of_the_token_shards_is_found(described, tmp_path) -> None:
    folder = Path(shutil.copytree(described, tmp_path / "run"))
    whole = (folder / DATA).read_bytes()
    for place in range(len(whole)):
        flip_bit(folder / DATA, (place + 0.5) / len(whole))
        with pytest.raises(DamagedDataError):
            open_run_folder(folder)
        (folder / DATA).write_bytes(whole)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [JOB, PLAN, DATA])
def test_a_pipe_in_a_run_folder_is_not_waited_for(described, tmp_path, name):
    run = Path(shutil.copytree(described, tmp_path / "run"))
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(UserError):
        open_run_folder(run)
