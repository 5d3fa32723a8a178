"""The record of a run: no step is lost or repeated, whoever dies when."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ledgers import gathering, record_attempt
from tokendrop.track import journal as journal_module
from tokendrop.track.journal import (
    LEDGER,
    METRICS,
    STEPS,
    Journal,
    MetricsTail,
    note_loss,
    read_events,
    read_ledger,
    read_steps,
)
from tokendrop.track.parts import span_of
from tokendrop.train.report import StepReport

STEPS_IN_ALL, GLOBAL_BATCH = 12, 4


def report(step: int, *, world_size: int = 1, **changes: float) -> StepReport:
    values = {
        "step": step,
        "loss": 1 / step,
        "val_loss": None if step % 2 else 0.5,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "kept_length": step,
        "tokens": 100 * step,
        "layer_tokens": 300 * step,
        "flops": 1e3 * step,
        "world_size": world_size,
        "data_time_s": 0.0,
        "step_time_s": 0.1,
    }
    return StepReport(**{**values, **changes})


def samples(step: int, rank: int, world_size: int) -> list[int]:
    """Those of 0-based step `step - 1` that a rank trains on."""
    first = (step - 1) * GLOBAL_BATCH
    return list(range(first + rank, first + GLOBAL_BATCH, world_size))


def test_what_is_committed_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a checkpoint that relies on it is, whatever becomes of the machine."""
    synced, fsync = set[int](), os.fsync

    def noted(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    journal = Journal(tmp_path, rank=0, world_size=1, start=0)
    for step in range(1, 4):
        journal.record(report(step), samples(step, 0, 1))
    journal.commit(3)
    parts = [part for dataset in (STEPS, LEDGER) for part in (tmp_path / dataset).iterdir()]
    assert len(parts) == 2
    assert {part.stat().st_ino for part in parts} <= synced


# an attempt: world size, step in which it dies, ranks that had written their part of the last commit by then, whether
# that commit's checkpoint was committed, and whether rank 0 writes the ledger of all
attempts = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 4]),
        st.integers(1, STEPS_IN_ALL),
        st.integers(0, 4),
        st.booleans(),
        st.booleans(),
    ),
    max_size=4,
)


def run_attempt(
    folder: Path,
    *,
    start: int,
    world_size: int,
    dies_in: int = STEPS_IN_ALL + 1,
    written: int = 4,
    saved: bool = True,
    gathers: bool = True,
) -> int:
    """Workers that record and commit as the loop does; the step of the last checkpoint when they end."""
    done = record_attempt(
        folder,
        range(start + 1, min(dies_in, STEPS_IN_ALL) + 1),
        lambda step: [samples(step, rank, world_size) for rank in range(world_size)],
        lambda step: report(step, world_size=world_size),
        world_size,
        written=written,
        saved=saved,
        gathers=gathers,
    )
    return max(done, default=start)


@given(attempts, st.sampled_from([1, 2, 4]), st.sampled_from([1, 3 * GLOBAL_BATCH - 1, 2**20]))
@settings(max_examples=40)
def test_every_step_and_sample_is_recorded_once_however_often_workers_die(
    tmp_path_factory: pytest.TempPathFactory,
    deaths: list[tuple[int, int, int, bool, bool]],
    last_world_size: int,
    most_samples: int,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    start = 0
    with patch.object(journal_module, "_MOST_SAMPLES", most_samples):
        for world_size, dies_in, written, saved, gathers in deaths:
            start = run_attempt(
                folder,
                start=start,
                world_size=world_size,
                dies_in=dies_in,
                written=written,
                saved=saved,
                gathers=gathers,
            )
        run_attempt(folder, start=start, world_size=last_world_size)

    rows, ledger = read_steps(folder), read_ledger(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS_IN_ALL + 1))
    for row in rows:
        assert row == asdict(report(row["step"], world_size=row["world_size"]))
        of_step = [entry for entry in ledger if entry["step"] == row["step"]]
        assert [entry["rank"] for entry in of_step] == list(range(row["world_size"]))
        for entry in of_step:
            assert entry["sample_ids"] == samples(row["step"], entry["rank"], row["world_size"])
    trained = sorted(sample for entry in ledger for sample in entry["sample_ids"])
    assert trained == list(range(STEPS_IN_ALL * GLOBAL_BATCH))


BATCH_OF_MANY, BOUND = 1024, 2500


@given(st.sets(st.integers(1, 8), min_size=1))
@example({8})
@example({3, 8})  # just where so many samples have come together
@settings(max_examples=3)
def test_parts_are_as_many_and_as_large_at_any_world_size_and_no_larger_than_a_bound(
    tmp_path_factory: pytest.TempPathFactory, commits: set[int]
) -> None:
    """One a commit, and one for each time that so many samples have come together since the last one."""
    spans: list[list[tuple[int, int] | None]] = []
    for world_size in (4, BATCH_OF_MANY):
        folder, share = tmp_path_factory.mktemp("run"), BATCH_OF_MANY // world_size
        with patch.object(journal_module, "_MOST_SAMPLES", BOUND):
            ranks = [
                Journal(folder, rank=rank, world_size=world_size, start=0, gather=way)
                for rank, way in enumerate(gathering(world_size))
            ]
            for step in range(1, max(commits) + 1):
                for rank in reversed(range(world_size)):
                    ranks[rank].record(report(step), [step * BATCH_OF_MANY + rank] * share)
                for journal in reversed(ranks) if step in commits else ():
                    journal.commit(step)
        for dataset, most_rows in ((STEPS, BOUND), (LEDGER, BOUND + BATCH_OF_MANY)):
            parts = sorted((folder / dataset).iterdir())
            assert len(parts) <= len(commits) + max(commits) * BATCH_OF_MANY // BOUND
            assert all(pq.read_metadata(part).num_rows <= most_rows for part in parts)
            spans.append([span_of(part) for part in parts])
        held = [sum(map(len, pq.read_table(part)["sample_ids"].to_pylist())) for part in parts]
        assert max(held) < BOUND + BATCH_OF_MANY
        assert sum(held) == max(commits) * BATCH_OF_MANY
    assert spans[:1] * 4 == spans
    assert None not in spans[0]


def test_a_part_half_written_is_not_read_and_is_removed_by_the_next_attempt(tmp_path: Path) -> None:
    run_attempt(tmp_path, start=0, world_size=1, dies_in=3)
    for dataset in (STEPS, LEDGER):
        (tmp_path / dataset / ".000000003-000000006-rank0.parquet.0123abcd").write_bytes(b"PAR1 torn")
    assert [row["step"] for row in read_steps(tmp_path)] == [1, 2, 3]
    run_attempt(tmp_path, start=3, world_size=1)
    assert [row["step"] for row in read_steps(tmp_path)] == list(range(1, STEPS_IN_ALL + 1))
    assert not list(tmp_path.rglob(".*.parquet*"))


def test_counts_of_a_run_of_the_papers_size_fit(tmp_path: Path) -> None:
    """1.3 billion parameters and 300 billion tokens: 1.8e21 FLOPs, more than 64-bit integers hold."""
    journal = Journal(tmp_path, rank=0, world_size=1, start=0)
    large = report(1, flops=1.81e21, tokens=300 * 10**9, layer_tokens=7_200 * 10**9)
    journal.record(large, [10**9])
    journal.commit(1)
    assert read_steps(tmp_path) == [asdict(large)]


def test_steps_are_live_in_order_with_a_line_for_each_attempt(tmp_path: Path) -> None:
    run_attempt(tmp_path, start=0, world_size=1, dies_in=7)
    run_attempt(tmp_path, start=6, world_size=2)
    lines = MetricsTail(tmp_path).read(limit=-1)
    starts = [(line["attempt_from"], line["world_size"]) for line in lines if "attempt_from" in line]
    assert starts == [(0, 1), (6, 2)]
    assert [line["step"] for line in lines if "step" in line] == [*range(1, 8), *range(7, STEPS_IN_ALL + 1)]


def test_a_torn_line_is_skipped_and_no_other(tmp_path: Path) -> None:
    """The writer died in the middle of a line, then another one went on."""
    run_attempt(tmp_path, start=0, world_size=1, dies_in=3)
    whole = (tmp_path / METRICS).read_bytes()
    torn = json.dumps(asdict(report(4))).encode()
    for length in range(len(torn)):
        (tmp_path / METRICS).write_bytes(whole + torn[:length])
        tail = MetricsTail(tmp_path)
        assert [line.get("step") for line in tail.read()] == [None, 1, 2, 3]
        Journal(tmp_path, rank=0, world_size=1, start=3)
        assert [line.get("attempt_from") for line in tail.read()] == [3]


@given(st.lists(st.integers(min_value=1, max_value=400), max_size=30))
@settings(max_examples=30)
def test_reading_as_it_grows_gives_what_reading_at_once_gives(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int]
) -> None:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("run")
    run_attempt(source, start=0, world_size=1)
    content = (source / METRICS).read_bytes()
    tail, found = MetricsTail(folder), []
    assert tail.read() == []
    written = 0
    for size in [*pieces, len(content)]:
        with (folder / METRICS).open("ab") as file:
            file.write(content[written : written + size])
        written += size
        found += tail.read()
        tail = MetricsTail(folder, tail.offset)  # as a mirror does that was started again
    assert found == MetricsTail(source).read(limit=-1)
    assert tail.offset == len(content)


def test_a_small_limit_reads_all_lines_in_turns(tmp_path: Path) -> None:
    run_attempt(tmp_path, start=0, world_size=1)
    longest = max(len(line) for line in (tmp_path / METRICS).read_bytes().splitlines())
    tail, found = MetricsTail(tmp_path), []
    while lines := tail.read(limit=longest + 2):
        found += lines
    assert found == MetricsTail(tmp_path).read(limit=-1)
    assert len(found) == STEPS_IN_ALL + 1


def test_runs_from_before_a_task_had_figures_are_read(tmp_path: Path) -> None:
    run_attempt(tmp_path, start=0, world_size=1)
    before = read_steps(tmp_path)
    for part in (tmp_path / STEPS).rglob("*.parquet"):
        pq.write_table(
            pq.read_table(part, partitioning=None).drop_columns("val_figures"), part, write_page_checksum=True
        )
    assert read_steps(tmp_path) == [{**row, "val_figures": None} for row in before]


def test_events_are_all_lines_but_those_of_steps(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    run_attempt(tmp_path, start=0, world_size=2, dies_in=8)
    note_loss(tmp_path, "rank 1")
    run_attempt(tmp_path, start=6, world_size=1)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"lost": "half a li')
    lines = MetricsTail(tmp_path).read(limit=-1)
    events = read_events(tmp_path)
    assert events == [line for line in lines if "step" not in line]
    assert [next(iter(line)) for line in events] == ["attempt_from", "lost", "attempt_from"]
