"""A resize is planned to take what it was measured to take."""

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies import MEASURED, plans
from tokendrop.bench.resizes import with_resizes
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import pause_s, step_s
from tokendrop.track.journal import METRICS


def write_pauses(run: Path, pauses: list[tuple[list[int], float]]) -> None:
    """As a run's record tells of its changes of workers."""
    with (run / METRICS).open("w") as file:
        for step, ((before, after), seconds) in enumerate(pauses):
            line = {"resize_at": step, "from": before, "to": after, "pause_s": seconds, "parts_s": {}, "time": step}
            file.write(json.dumps(line) + "\n")


@given(plans(), st.data())
def test_half_of_the_resizes_took_longer_than_planned_and_half_did_not(plan: RunPlan, drawn: st.DataObject) -> None:
    legal = plan.batch.world_sizes(1, 8)
    assume(len(legal) > 1)
    sizes = st.lists(st.sampled_from(legal), min_size=2, max_size=2, unique=True)
    most = min(9, plan.steps)
    pauses = drawn.draw(st.lists(st.tuples(sizes, st.floats(1e6, 1e7)), min_size=1, max_size=most))
    with TemporaryDirectory() as run:
        write_pauses(Path(run), pauses)
        profile = with_resizes(MEASURED, plan, Path(run))
    longer = [
        seconds - pause_s(plan, profile, before, after) - step_s(plan, profile, plan.at(step), after)
        for step, ((before, after), seconds) in enumerate(pauses)
    ]
    assert median(longer) == pytest.approx(0, abs=1e-6)


def test_a_run_whose_workers_never_changed_is_refused_before_anything_is_timed(tmp_path: Path, complaint) -> None:
    job = Path(__file__).parents[2] / "jobs" / "pretrain" / "quickstart.yaml"
    out = tmp_path / "here.yaml"
    said = complaint("profile", str(job), "--out", str(out), "--resizes", str(tmp_path))
    assert said == f"{tmp_path}: not a run folder (no job.yaml in it); want one that 'tokendrop train' made"
    said = complaint("profile", "--from", "device.json", "--resizes", str(tmp_path))
    assert said == "profile: --resizes goes with a job, not with --from"
