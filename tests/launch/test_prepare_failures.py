"""What stops a preparation is told in one sentence, and leaves what is committed as it was."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.fs as pafs
import pytest
import yaml
from ray import cloudpickle

import deadly
from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from folders import bytes_of
from tokendrop.config.load import load_job
from tokendrop.data.corpus.sources import SourceFile, _version, list_files
from tokendrop.data.prepare import pipeline, stages
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.read.row_reader import FAILED, note_failure, noted_failure
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import UserError
from tokendrop.launch.cluster import source_path

pytestmark = [pytest.mark.ray, pytest.mark.long]


def prepare_alone(job: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """By the command, with a Ray of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tokendrop", "prepare", str(job), *overrides],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        | {"PYTHONPATH": source_path()},
        timeout=200,
        check=False,
    )


def job_of(folder: Path, corpus: list[Path | str], **data: object) -> Path:
    given = {"tokenizer": str(byte_tokenizer(folder / "tokenizer.json")), **data}
    return tiny_job(folder, corpus, data=given)


# --- processes that die ---


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("files", "after", "how"),
    [(6, 0, "deadly"), (6, 3, "deadly"), (130, 1, "deadly"), (6, 3, "late"), (6, 5, "late")],
)
def test_a_file_whose_reader_dies_is_named_and_ends_the_preparation(tmp_path, monkeypatch, files, after, how):
    """Of several files that one task reads; after some of a file was read; in the last file."""
    cloudpickle.register_pickle_by_value(deadly)  # workers can't import it
    monkeypatch.setattr(stages, "_BLOCK_CHARACTERS", 100_000)
    size = 8000 if how == "late" else 60  # 2 MB, or a block
    corpus = [
        write_corpus(tmp_path / f"corpus/{n:03}.jsonl", documents(size if n == after else 60, seed=n))
        for n in range(files)
    ]
    killer = corpus[after].rename(tmp_path / f"corpus/{after:03}-{how}.jsonl")
    here = list_files

    def stored(*given: object, **named: object) -> list[SourceFile]:
        store = pafs.PyFileSystem(deadly.DeadlyHandler())
        version = [_version(store, store.get_file_info(file.path)) for file in here(*given, **named)]
        files = zip(here(*given, **named), version, strict=True)
        return [replace(file, store=store, modified=modified) for file, modified in files]

    monkeypatch.setattr(pipeline, "list_files", stored)
    config = load_job(job_of(tmp_path, [tmp_path / "corpus"]))
    with pytest.raises(UserError, match=f"^data.corpus: {killer}: the process that reads or tokenizes this file died"):
        prepare(config)
    (note,) = (tmp_path / "runs" / "data").glob(f"*/{FAILED}")
    assert str(killer) in note.read_text()


# --- disks that are full ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here: it wants root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("corpus", ["lines", "python"])
def test_a_full_disk_ends_it_at_once_and_with_more_room_it_goes_on(tmp_path, small_disk, corpus):
    lines = write_corpus(tmp_path / "corpus.jsonl", documents(8000))
    given = ["python"] if corpus == "python" else [lines]
    job = job_of(tmp_path, given, rows_per_shard=256)
    put(job, small_disk / "data")
    ended = prepare_alone(job)
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("tokendrop: the preparation failed (")
    assert last.endswith("No space left on device); what is committed stays for the next attempt")
    assert "Traceback" not in ended.stderr
    left = [path.name for path in (small_disk / "data").rglob("*") if path.is_file()]
    assert not [name for name in left if name.startswith(".") and name != ".lock"], left
    if corpus == "python":
        return
    (folder,) = (small_disk / "data").iterdir()
    committed = read_manifest(folder).shards
    assert committed
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    ended = prepare_alone(job)
    assert ended.returncode == 0, ended.stderr
    assert set(committed) <= set(read_manifest(folder).shards)
    assert not (folder / FAILED).exists()
    put(job, tmp_path / "elsewhere")
    assert prepare_alone(job).returncode == 0
    assert bytes_of(folder) == bytes_of(tmp_path / "elsewhere" / folder.name)


def put(job: Path, folder: Path) -> None:
    """Have a job's token shards there."""
    tree = yaml.safe_load(job.read_text())
    tree["data"]["folder"] = str(folder)
    job.write_text(yaml.safe_dump(tree))


def test_a_note_of_failure_is_told_whatever_became_of_it(tmp_path, small_disk):
    assert noted_failure(small_disk) is None
    note_failure(small_disk, "the corpus is gone")
    assert noted_failure(small_disk) == "the corpus is gone"
    (small_disk / FAILED).write_bytes(b"\xff gone")
    assert noted_failure(small_disk) == "\\xff gone"
    (small_disk / FAILED).unlink()
    (small_disk / "full").touch()
    with pytest.raises(OSError, match="No space"):
        (small_disk / "full").write_bytes(bytes(2**20))
    note_failure(small_disk, "the corpus is gone")
    assert "its preparation stopped" in (noted_failure(small_disk) or "")
    (small_disk / FAILED).unlink()
    (small_disk / FAILED).mkdir()
    assert "its preparation stopped" in (noted_failure(small_disk) or "")
