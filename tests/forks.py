"""Runs of one worker without Ray, and forks of them."""

from pathlib import Path
from typing import Any

import numpy as np

from folders import Document, write_folder
from tiny import SEED
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.tokenizer import train_tokenizer
from tokendrop.elastic.control import RunControl
from tokendrop.launch.fork import begun_fork
from tokendrop.launch.resume import check_goes_on
from tokendrop.launch.worker import run_worker
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.journal import read_steps
from tokendrop.track.run_folder import open_run_folder

STEPS, AT = 8, 4
JOB: dict[str, object] = {
    "train__length": f"{STEPS} steps",
    "checkpoint": {"every": "2 steps", "keep": 4},
    "evaluate": {"every": "4 steps", "sequences": 8},
    "track": {"uri": None},
    "scaling": {"cpus_per_worker": 1},
    "model__vocab_size": 300,
}


def trained(run: Path, config: ExperimentConfig, data: Path) -> Path:
    """A worker's part in a run, from its last checkpoint on, without Ray."""
    RunControl(run).reset()
    run_worker(WorkerSpec(config=config, run=run, data=data))
    return run


def forked(parent: Path, step: int, *overrides: str) -> Path:
    """A fork, trained as `--resume` does."""
    with begun_fork(parent, step, overrides) as (config, run):
        check_goes_on(config, run)
        return trained(run, config, open_run_folder(run)[1])


def history(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.endswith("time_s")} for row in read_steps(run)]


def write_data(folder: Path) -> Path:
    """Token shards for such runs."""
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, 300, (48, 17)).tolist()
    documents = [*map(Document, rows[:40]), *(Document(row, split="validation") for row in rows[40:])]
    tokenizer = train_tokenizer(iter(["a stone under the river"] * 9), vocab_size=300).to_str()
    write_folder(folder, [("corpus", documents)], tokenizer=tokenizer, sequence_length=16, vocab_size=300)
    return folder
