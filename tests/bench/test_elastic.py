"""`tokendrop bench elastic`: worker-seconds are what was held, and predictions start from the paper's own hours."""

from pathlib import Path

import pytest

from tokendrop.bench.elastic import bench_elastic, predicted_gpu_days, worker_seconds
from tokendrop.errors import UserError
from tokendrop.track.journal import Journal
from tokendrop.track.run_folder import read_attempts
from tokendrop.train.report import StepReport

STEP_S = 0.25
PAPER_DAYS = {"350m": (2.59, 2.22), "1.3b": (5.42, 4.03)}  # table 1, on 64 GPUs


def report(step: int, world_size: int) -> StepReport:
    zeros = dict.fromkeys(("loss", "grad_norm", "lr", "flops", "data_time_s"), 0.0)
    counts = {"kept_length": 1, "tokens": step, "layer_tokens": step}
    return StepReport(step=step, val_loss=None, world_size=world_size, step_time_s=STEP_S, **counts, **zeros)


def test_worker_seconds_are_of_steps_and_of_all_that_wait_while_workers_change(tmp_path: Path) -> None:
    for start, world_size in ((0, 1), (2, 4), (4, 2)):
        ranks = [Journal(tmp_path, rank=rank, world_size=world_size, start=start) for rank in range(world_size)]
        for journal in ranks:
            for step in (start + 1, start + 2):
                journal.record(report(step, world_size), [step])
            journal.commit(start + 2)
        ranks[0].pause(start + 2, checkpoint_s=0.5)
    pauses = [one["pause_s"] for one in read_attempts(tmp_path)[1]]
    assert len(pauses) == 2
    assert min(pauses) >= 0.5
    assert worker_seconds(tmp_path) == pytest.approx(STEP_S * 2 * (1 + 4 + 2) + 4 * sum(pauses))


@pytest.mark.parametrize("model", PAPER_DAYS)
def test_predictions_start_from_the_papers_days_and_a_plan_takes_no_more(model: str) -> None:
    full, dropping, by_plan = predicted_gpu_days(model)
    assert (full, dropping) == pytest.approx([64 * days for days in PAPER_DAYS[model]], rel=2e-3)
    assert by_plan <= dropping


def test_a_job_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml"):
        bench_elastic(tmp_path / "none.yaml", [], resizes=1, stretch=1, picture=None, say=print)
