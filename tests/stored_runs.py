"""Runs in a store, as drivers and workers write them and other machines read them."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from tokendrop.track.journal import LEDGER, LEDGER_SCHEMA, METRICS
from tokendrop.track.parts import span_of, write_part
from tokendrop.track.run_copy import bring
from tokendrop.track.run_home import RunHome, write_home
from tokendrop.track.run_store import PLACE, runs_place
from tokendrop.train.checkpoint_index import CHECKPOINTS, META, check_whole, committed, step_name, step_of, write_meta
from tokendrop.train.sealed import file_sha256

EVERY = 3  # steps from one checkpoint to the next


def begun(runs: str) -> RunHome:
    """A run of which nothing is trained."""
    folder = runs_place(runs) / "one"
    write_home(folder, runs.replace("?", "/one?"))
    (folder / "job.yaml").write_text("name: one\n")
    (folder / METRICS).write_text('{"driver_from": 0}\n')
    home = RunHome(folder)
    home.take_over()
    home.begin()
    return RunHome(folder)  # as a worker has it


def written(home: RunHome, step: int, content: str = "weights") -> Path:
    """A checkpoint that the workers have written, and what the run has recorded up to it; not committed."""
    row = {"step": [step], "rank": [0], "world_size": [1], "sample_ids": [[step]]}
    write_part(home.folder / LEDGER, pa.table(row, schema=LEDGER_SCHEMA), start=step - EVERY, end=step, rank=0)
    with (home.folder / METRICS).open("a") as live:
        live.write(f'{{"paused_at": {step}}}\n{{"half a li')
    checkpoint = home.folder / CHECKPOINTS / f"{step_name(step)}.partial"
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.distcp").write_text(f"{content} of {step}")
    write_meta(checkpoint, {"step": step}, {"weights.distcp": file_sha256(checkpoint / "weights.distcp")})
    return checkpoint


def save(home: RunHome, step: int, *, keep: int = 1, content: str = "weights") -> None:
    """As `Checkpoints` does."""
    checkpoint = written(home, step, content)
    home.put(checkpoint / "weights.distcp")
    home.commit(checkpoint)
    shutil.rmtree(checkpoint.with_suffix(""), ignore_errors=True)
    checkpoint.rename(checkpoint.with_suffix(""))
    for old in committed(home.folder / CHECKPOINTS)[:-keep]:
        shutil.rmtree(old)
    home.remove_old(keep)


def in_store(home: RunHome, step: int) -> str:
    """The name there of the weights of a checkpoint."""
    folder = f"{CHECKPOINTS}/{step_name(step)}/"
    (found,) = [name for name in home.store.files(CHECKPOINTS) if name.startswith(folder) and META not in name]
    return found


def elsewhere(runs: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run as another machine gets it."""
    monkeypatch.setenv(PLACE, str(folder))
    return bring(runs, "one")


def state(run: Path) -> tuple[int, list[int]]:
    """The step of a run's newest checkpoint, which is whole, and the ends of its parts."""
    saved = committed(run / CHECKPOINTS)
    for checkpoint in saved:
        check_whole(checkpoint)
    spans = [span_of(part) for part in (run / LEDGER).glob("*.parquet")]
    return (step_of(saved[-1]) if saved else 0), sorted(span[1] for span in spans if span)
