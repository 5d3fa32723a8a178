"""Corpora on the Hugging Face hub, by `hf://`: what is read there is what is in the files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpora import byte_tokenizer, documents, tiny_job
from folders import all_tokens
from hub import hub
from tokendrop.data.shards.format import SPLITS, TOKENIZER
from tokendrop.data.shards.manifest import read_manifest

ROOT = Path(__file__).parents[2]
TASK = "owner/tasks/rte"
ROWS = [{"idx": n, "sentence1": f"one {n}", "sentence2": "é\n\ttwo", "label": n % 2} for n in range(40)]
READ = """
import json, sys
from pathlib import Path
from tokendrop.data.corpus.records import RecordForm, read_records
from tokendrop.data.corpus.sources import check_unchanged, list_files
from tokendrop.errors import UserError

columns = ("sentence1", "sentence2", "label")
form = RecordForm(text_key="", subset_key="", only=frozenset(), max_document_bytes=10**6, columns=columns)
told = {}
for entry in sys.argv[2:]:
    try:
        files = list_files([entry], cache=Path(sys.argv[1]))
        [check_unchanged(file) for file in files]
        told[entry] = [[file.name, [record.text for record in read_records(file, form)]] for file in files]
    except UserError as error:
        told[entry] = str(error)
print(json.dumps(told))
"""
"""What preparation does first, in a process that has not asked a hub before."""


def write_table(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=16)


def environment(endpoint: str, cache: Path) -> dict[str, str]:
    """Of a user with a network, whose hub this is."""
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")}
    return kept | {"PYTHONPATH": str(ROOT / "platform"), "HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}


def test_files_are_found_by_their_pattern_and_hold_the_rows_that_were_put_there(tmp_path: Path) -> None:
    for name, rows in (("train-00000-of-00002", ROWS[:25]), ("train-00001-of-00002", ROWS[25:]), ("test", ROWS[:1])):
        write_table(tmp_path / "hub" / "datasets" / TASK / f"{name}.parquet", rows)
    train, folder, missing, nowhere = (
        f"hf://datasets/{path}"
        for path in (f"{TASK}/train-*.parquet", TASK, f"{TASK}/validation-*", "owner/gone/train-*.parquet")
    )
    with hub(tmp_path / "hub") as endpoint:
        done = subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path), train, folder, missing, nowhere],
            env=environment(endpoint, tmp_path / "cache"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [name for name, _ in told[train]] == [
        f"hf://datasets/{TASK}/train-0000{number}-of-00002.parquet" for number in (0, 1)
    ]
    read = [tuple(json.loads(text)) for _, texts in told[train] for text in texts]
    assert read == [(row["sentence1"], row["sentence2"], row["label"]) for row in ROWS]
    assert [name.rpartition("/")[2] for name, _ in told[folder]] == [
        "test.parquet",
        *(f"train-0000{number}-of-00002.parquet" for number in (0, 1)),
    ]
    for entry in (missing, nowhere):
        assert told[entry].startswith(f"data.corpus: no such file, folder or glob: {entry} ")


@pytest.mark.long
@pytest.mark.ray
def test_a_corpus_of_the_hub_is_prepared_as_the_same_files_here_are(tmp_path: Path) -> None:
    texts = documents(300, seed=3)
    place = tmp_path / "hub" / "datasets" / "owner" / "text" / "data"
    for number in range(2):
        write_table(place / f"train-{number}.parquet", [{"text": text} for text in texts[number::2]])
    tokenizer = str(byte_tokenizer(tmp_path / "tokenizer.json"))

    def prepared(name: str, corpus: str, endpoint: str) -> dict[str, list[int]]:
        folder = tmp_path / name
        folder.mkdir()
        job = tiny_job(folder, [corpus], data={"tokenizer": tokenizer})
        subprocess.run(
            [sys.executable, "-m", "tokendrop", "prepare", str(job)],
            env=environment(endpoint, tmp_path / "cache"),
            check=True,
            capture_output=True,
        )
        (made,) = (found.parent for found in folder.glob(f"runs/data/*/{TOKENIZER}"))
        manifest = read_manifest(made)
        assert manifest.header.is_complete
        return {split: all_tokens(made, manifest, "corpus", split) for split in SPLITS}

    with hub(tmp_path / "hub") as endpoint:
        found = prepared("from_hub", "hf://datasets/owner/text/data/train-*.parquet", endpoint)
    assert found == prepared("from_here", f"{place}/train-*.parquet", "http://127.0.0.1:9")
    assert len(found["train"]) > 1000
