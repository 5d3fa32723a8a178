"""Preparation on a cluster whose head has no cores and whose nodes come when they are asked for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corpora import byte_tokenizer, documents, tiny_job, write_corpus
from folders import bytes_of
from kills import audited

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(500)]

# blocks of a few documents, a reader for each core, and a writer that waits, once training can start, until it has
SCRIPT = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
import ray
from tokendrop.config.load import load_job
from tokendrop.data.prepare import stages
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.prepare.writer import ShardWriter
from tokendrop.launch.cluster import connect
from tokendrop.launch.trainer import run_training
from tokendrop.track.journal import METRICS

config = load_job(Path(sys.argv[1]))
stages._BLOCK_DOCUMENTS, stages._CPUS_PER_READER = 20, 1
connect()
cores = ray.cluster_resources().get("CPU", 0)
write, begin, readers = ShardWriter._write, stages._round, []

def write_later(writer, *shard):
    ready = sum(read_manifest(writer.folder).committed("train").rows) >= config.data.shuffle_rows
    while ready and not list(Path(config.runs_folder).glob(f"tiny-*/{METRICS}")):
        time.sleep(0.1)
    write(writer, *shard)

def begin_counted(work, count, tokenize):
    readers.append(count)
    return begin(work, count, tokenize)

ShardWriter._write, stages._round = write_later, begin_counted
run = run_training(config)["run"]
grown = [*readers]
prepare(config)  # the run is over before its preparation
stages._CPUS_PER_READER, before = 1000, len(readers)
alone = prepare(replace(config, data=replace(config.data, folder=config.data.folder + "-alone")))
print(json.dumps({"run": run, "cores_at_first": cores, "readers": grown, "readers_alone": readers[before:]}))
"""


def test_training_follows_and_readers_grow_from_a_head_without_cores(
    tmp_path: Path, cluster: dict[str, Any], environment: dict[str, str]
) -> None:
    job = tiny_job(
        tmp_path,
        [write_corpus(tmp_path / f"{number}.jsonl", documents(150, seed=number)) for number in range(4)],
        data={
            "tokenizer": str(byte_tokenizer(tmp_path / "tokenizer.json")),
            "rows_per_shard": 64,
            "shuffle_rows": 128,
        },
        train={"length": "30 steps", "global_batch": 8, "micro_batch": 4, "peak_lr": 1e-3},
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(job)],
        env=environment | cluster["environment"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["cores_at_first"] == 0
    assert said["readers"][0] == 1
    assert said["readers"][-1] >= 2
    assert said["readers_alone"] == [1]
    assert audited(Path(said["run"])) == (0, 0)
    grown, alone = (next((tmp_path / "runs").glob(f"{name}/????????????????")) for name in ("data", "data-alone"))
    assert bytes_of(grown) == bytes_of(alone)  # what shards hold does not depend on nodes
