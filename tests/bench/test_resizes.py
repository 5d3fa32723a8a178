"""A resize is planned to take what it was measured to take."""

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies import MEASURED, plans
from tiny import experiment
from tokendrop.bench.resizes import plan_with_resizes, with_resizes
from tokendrop.errors import UserError
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import pause_s, step_s
from tokendrop.track.journal import METRICS
from tokendrop.track.run_folder import describe_run


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


def test_a_run_whose_micro_batch_has_changed_since_is_refused(tmp_path: Path) -> None:
    config = experiment(train__micro_batch=8)  # of a global batch of 8
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.json").write_text("{}")
    describe_run(tmp_path, config, tmp_path / "data")
    write_pauses(tmp_path, [([1, 2], 9.0)])
    with pytest.raises(UserError, match=r"micro batch never changed; 2 workers do not share it now$"):
        plan_with_resizes(tmp_path)


def test_a_run_whose_workers_never_changed_is_refused_before_anything_is_timed(tmp_path: Path, complaint) -> None:
    job = Path(__file__).parents[2] / "jobs" / "pretrain" / "quickstart.yaml"
    out = tmp_path / "here.yaml"
    said = complaint("profile", str(job), "--out", str(out), "--resizes", str(tmp_path))
    assert said == f"{tmp_path}: not a run folder (no job.yaml in it); want one that 'tokendrop train' made"
    said = complaint("profile", "--from", "device.json", "--resizes", str(tmp_path))
    assert said == "profile: --resizes and --nodes go with a job, not with --from"
