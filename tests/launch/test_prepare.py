"""Training beside its preparation: it makes no difference to a run how far the token shards have come."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.prepare.writer import ShardWriter
from tokendrop.data.shards.format import MANIFEST
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError
from tokendrop.launch.trainer import run_training
from tokendrop.track.journal import read_ledger, read_steps
from tokendrop.track.run_folder import read_attempts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def slowly(monkeypatch, tmp_path) -> None:
    """Preparation that holds, once training can start, until it has."""
    write = ShardWriter._write

    def write_later(writer: ShardWriter, *shard) -> None:
        rows = sum(one.rows for one in read_manifest(writer.folder).of("corpus", "train"))
        while rows >= 256 and not any(read_attempts(run)[0] for run in (tmp_path / "runs").glob("tiny-*")):
            time.sleep(0.05)
        write(writer, *shard)

    monkeypatch.setattr(ShardWriter, "_write", write_later)


def config_of(folder: Path, **data: object) -> ExperimentConfig:
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus, documents(500, seed=3))
    job = tiny_job(
        folder,
        [corpus],
        data={
            "tokenizer": str(byte_tokenizer(folder / "tokenizer.json")),
            "rows_per_shard": 64,
            "shuffle_rows": 128,
            "max_rejected": 0,
            **data,
        },
        train={"length": "100 steps", "global_batch": 16, "micro_batch": 8, "peak_lr": 1e-3, "precision": "fp64"},
        checkpoint={"every": "50 steps"},
    )
    return load_job(job)


@pytest.fixture(scope="module")
def prepared_first(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """A run on token shards that were all there when it began."""
    config = config_of(tmp_path_factory.mktemp("prepared"))
    prepare(config)
    return Path(run_training(config)["run"])


@pytest.mark.parametrize("reader", ["memory_map", pytest.param("ray_data", marks=pytest.mark.long)])
def test_a_run_that_follows_its_preparation_is_the_run_on_prepared_shards(tmp_path, prepared_first, slowly, reader):
    run = Path(run_training(config_of(tmp_path, reader=reader))["run"])
    (first,) = read_attempts(run)[0]
    (manifest,) = (tmp_path / "runs" / "data").glob(f"*/{MANIFEST}")
    assert first["attempt_from"] == 0
    assert first["time"] < manifest.stat().st_mtime  # it did follow
    assert read_ledger(run) == read_ledger(prepared_first)
    np.testing.assert_array_equal(
        [row["loss"] for row in read_steps(run)], [row["loss"] for row in read_steps(prepared_first)]
    )


@pytest.mark.long
def test_a_run_ends_in_one_sentence_where_its_preparation_does(tmp_path, slowly):
    config_of(tmp_path)
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        corpus.write("not json\n")
    with pytest.raises(UserError, match=r"1 of 501 documents can't be read, .*corpus\.jsonl:501: not valid JSON"):
        run_training(load_job(tmp_path / "job.yaml", ["train.length=10000 steps"]))


@pytest.mark.long
def test_another_number_of_samples_than_the_job_says_is_told_when_training_has_all_of_its_rows(tmp_path, slowly):
    config = config_of(tmp_path, epoch_samples=1000)
    with pytest.raises(UserError, match=r"^data\.epoch_samples: .* the job says 1,000; want data\.epoch_samples="):
        run_training(config)


@pytest.mark.long
def test_a_run_ends_where_the_disk_of_its_preparation_is_full(tmp_path, slowly, monkeypatch):
    def full(writer: ShardWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardWriter, "finish", full)
    config_of(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        run_training(load_job(tmp_path / "job.yaml", ["train.length=10000 steps"]))
    (run,) = (tmp_path / "runs").glob("tiny-*")
    assert len(read_attempts(run)[0]) == 1  # it was not tried again


@pytest.mark.long
def test_what_is_prepared_when_a_short_run_is_over_stays_for_the_next(tmp_path, slowly):
    config = config_of(tmp_path)
    short = load_job(tmp_path / "job.yaml", ["train.length=2 steps"])
    run_training(short)
    (folder,) = (path.parent for path in (tmp_path / "runs" / "data").glob(f"*/{MANIFEST}"))
    before = read_manifest(folder)
    assert sum(before.committed("train").rows) >= config.data.shuffle_rows
    assert prepare(config) == folder
    after = read_manifest(folder)
    assert after.header.is_complete
    assert set(before.shards) <= set(after.shards)
