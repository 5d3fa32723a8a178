"""The audit of a run's ledger: clean whoever died when, and no fault passes."""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from ledgers import BATCH, SAVE_EVERY, STEPS, WORLD_SIZES, Line, Run, lists_of, make_run, take, with_ledger
from tokendrop.track import audit as audit_module
from tokendrop.track.audit import Audit, Fault, Stretch, audit
from tokendrop.track.journal import LEDGER, LEDGER_SCHEMA, read_ledger

# an attempt: world size, its last step, ranks that had written their part of the last commit by then, whether that
# commit's checkpoint was committed, and whether rank 0 writes the ledger of all
attempts = st.lists(
    st.tuples(st.sampled_from(WORLD_SIZES), st.integers(1, STEPS), st.integers(0, 4), st.booleans(), st.booleans()),
    max_size=4,
)
shapes = st.sampled_from([(50,), (13,), (3, 40), (7, 30, 11)])
windows = st.sampled_from([0, 5, 16, 1000])
blocks = st.sampled_from([1, 3 * BATCH, 2**20])


def audited(run: Run, block: int = 2**20) -> Audit:
    with patch.object(audit_module, "_BLOCK", block), patch.object(audit_module, "_ORDER_BLOCK", max(1, block // 3)):
        return audit(run.folder)


def stretches(ledger: list[dict[str, int]]) -> Iterator[Stretch]:
    """The oracle of world sizes: step by step."""
    by_step = {line["step"]: line["world_size"] for line in ledger}
    first = 1
    for step in range(1, len(by_step) + 1):
        if by_step.get(step + 1) != by_step[step]:
            yield Stretch(from_step=first, to_step=step, world_size=by_step[step])
            first = step + 1


@given(attempts, st.sampled_from(WORLD_SIZES), st.integers(SAVE_EVERY, STEPS), shapes, windows, blocks)
@settings(max_examples=25)
def test_a_ledger_is_clean_whoever_died_when_at_whatever_world_sizes(
    tmp_path_factory, deaths, world_size, end, rows, window, block
):
    run = make_run(tmp_path_factory.mktemp("run") / "lr=0.1", rows=rows, window=window)
    start = 0
    for size, last, written, saved, gathers in deaths:
        start = run.attempt(size, start=start, end=last, written=written, saved=saved, gathers=gathers)
    start = run.attempt(world_size, start=start, end=max(start, end))

    found = audited(run, block)

    assert found.is_clean
    assert (found.steps, found.samples, found.where) == (start, start * BATCH, ())
    assert found.world_sizes == tuple(stretches(read_ledger(run.folder)))


def where(audit: Audit) -> set[tuple[int, int, str]]:
    return {(fault.step, fault.sample_id, fault.what) for fault in audit.where}


places = st.tuples(st.integers(1, STEPS), st.integers(0, BATCH - 1))


@given(places, st.sampled_from(["removed", "repeated", "changed"]), blocks)
@settings(max_examples=25)
def test_a_sample_removed_repeated_or_changed_is_found_in_its_place(tmp_path_factory, resized, place, fault, block):
    sample = -1

    def change(tables: list[list[Line]]) -> None:
        nonlocal sample
        ids, number = take(tables, place)
        sample = ids[number]
        ids[number : number + 1] = {"removed": [], "repeated": [sample, sample], "changed": [2**50]}[fault]

    found = audited(with_ledger(resized, tmp_path_factory.mktemp("run") / "run", change), block)

    missing, repeated, expected = {
        "removed": (1, 0, {(place[0], sample, "missing")}),
        "repeated": (0, 1, {(place[0], sample, "repeated")}),
        "changed": (1, 1, {(place[0], sample, "missing"), (place[0], 2**50, "wrong")}),
    }[fault]
    assert (found.missing, found.repeated, where(found)) == (missing, repeated, expected)
    assert found.samples == STEPS * BATCH - missing + repeated


@given(places, st.integers(1, STEPS), blocks)
@settings(max_examples=25)
def test_a_sample_moved_to_another_step_is_missing_there_and_too_many_here(
    tmp_path_factory, resized, place, target, block
):
    sample = -1

    def change(tables: list[list[Line]]) -> None:
        nonlocal sample
        ids, number = take(tables, place)
        sample = ids.pop(number)
        lists_of(tables, target)[-1].append(sample)

    found = audited(with_ledger(resized, tmp_path_factory.mktemp("run") / "run", change), block)

    assert found.samples == STEPS * BATCH
    if target == place[0]:  # another rank of the same step
        assert found.is_clean
    else:
        assert (found.missing, found.repeated) == (1, 1)
        assert where(found) == {(place[0], sample, "missing"), (target, sample, "wrong")}


edits = st.lists(
    st.tuples(places, st.sampled_from(["remove", "repeat", "change", "step", "drop line"]), st.integers(-2, 15)),
    min_size=1,
    max_size=6,
)


@given(edits, blocks)
@settings(max_examples=40)
def test_any_faults_are_counted_as_comparing_step_by_step_counts_them(tmp_path_factory, resized, edits, block):
    expected = {step: Counter(resized.ids_of(step)) for step in range(1, STEPS + 1)}

    def change(tables: list[list[Line]]) -> None:
        for (step, number), edit, value in edits:
            lines = [(part, line) for part in tables for line in part if line["step"] == step]
            if not lines:
                continue
            part, line = lines[number % len(lines)]
            ids = line["sample_ids"]
            if edit == "drop line":
                part.remove(line)
            elif edit == "step":  # a line that names a step which may not even be of its part
                line["step"] = value
            elif ids:
                at = number % len(ids)
                ids[at : at + 1] = {"remove": [], "repeat": [ids[at]] * 3, "change": [value]}[edit]

    run = with_ledger(resized, tmp_path_factory.mktemp("run") / "run", change)
    found = audited(run, block)

    ledger: dict[int, Counter[int]] = {}
    for line in read_ledger(run.folder):
        ledger.setdefault(line["step"], Counter()).update(line["sample_ids"])
    steps = expected.keys() | ledger.keys()
    lacks = {step: expected.get(step, Counter()) - ledger.get(step, Counter()) for step in steps}
    surplus = {step: ledger.get(step, Counter()) - expected.get(step, Counter()) for step in steps}
    wrong_part = any(edit == "step" for _, edit, _ in edits)
    missing, repeated = (sum(one.total() for one in side.values()) for side in (lacks, surplus))
    assert found.samples - found.repeated + found.missing == STEPS * BATCH
    if wrong_part:  # what a part tells of steps that are not its own counts as wrong, even where it would be right
        assert found.missing >= missing
        assert found.repeated >= repeated
        assert found.missing - missing == found.repeated - repeated
    else:
        assert (found.missing, found.repeated) == (missing, repeated)
        faulty = {step for step in steps if lacks[step] or surplus[step]}
        assert (found.faulty_steps, found.last_faulty_step) == (len(faulty), max(faulty, default=None))
    assert found.is_clean == (found.where == ())
    assert list(found.where) == sorted(found.where, key=lambda fault: fault.step) or wrong_part


@given(st.data())
@settings(max_examples=25)
def test_a_part_that_is_gone_leaves_its_samples_missing(tmp_path_factory, resized, data):
    folder = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(resized.folder, folder)
    parts = sorted((folder / LEDGER).iterdir())
    gone = data.draw(st.sets(st.sampled_from(parts), min_size=1))
    lost = [one for part in gone for line in pq.read_table(part).to_pylist() for one in line["sample_ids"]]
    for part in gone:
        part.unlink()
    found = audited(replace(resized, folder=folder), data.draw(blocks))
    assert (found.missing, found.repeated, found.samples) == (len(lost), 0, STEPS * BATCH - len(lost))
    assert {fault.sample_id for fault in found.where} <= set(lost)
    assert found.world_sizes[-1].to_step == STEPS


@given(st.integers(0, STEPS - 1), st.integers(1, STEPS), blocks)
@settings(max_examples=25)
def test_a_part_that_a_dead_worker_wrote_too_late_repeats_its_samples(tmp_path_factory, resized, start, length, block):
    run = with_ledger(resized, tmp_path_factory.mktemp("run") / "run", lambda tables: None)
    end = min(start + length, STEPS)
    lines = [
        {"step": step, "rank": 9, "world_size": 10, "sample_ids": run.ids_of(step)}
        for step in range(start + 1, end + 1)
    ]
    part = run.folder / LEDGER / f"{start:09}-{end:09}-rank9.parquet"
    pq.write_table(LEDGER_SCHEMA.empty_table().from_pylist(lines, LEDGER_SCHEMA), part)
    found = audited(run, block)
    assert (found.missing, found.repeated) == (0, (end - start) * BATCH)
    assert {fault.what for fault in found.where} == {"repeated"}
    assert (found.where[0].step, found.where[0].sample_id) == (start + 1, min(run.ids_of(start + 1)))


def test_a_whole_ledger_that_is_gone_is_all_missing(tmp_path, resized):
    run = with_ledger(resized, tmp_path / "run", lambda tables: None)
    shutil.rmtree(run.folder / LEDGER)
    found = audit(run.folder)
    assert (found.missing, found.repeated, found.samples) == (STEPS * BATCH, 0, 0)
    assert found.world_sizes == (Stretch(from_step=1, to_step=STEPS, world_size=None),)
    assert found.where[0] == Fault(step=1, sample_id=min(run.ids_of(1)), what="missing")
    assert len(found.where) < found.missing


def test_of_a_run_at_work_the_committed_steps_are_looked_at(tmp_path):
    run = make_run(tmp_path, rows=(1000,), is_complete=False, window=32)
    run.attempt(2, start=0, end=7)
    run.attempt(4, start=6, end=9, written=3)  # one rank is about to write its part
    (tmp_path / LEDGER / ".000000006-000000009-rank3.parquet").write_bytes(b"PAR1 half")
    found = audit(tmp_path)
    assert found.is_clean
    assert (found.steps, found.samples) == (6, 6 * BATCH)
    run.checkpoint(9)  # that no rank 3 ever wrote for
    assert (audit(tmp_path).missing, audit(tmp_path).repeated) == (3 * BATCH // 4, 0)
