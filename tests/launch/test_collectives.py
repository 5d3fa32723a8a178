"""What workers tell rank 0 reaches it in the order of ranks, and nobody else."""

from pathlib import Path

import pytest
import torch.distributed as dist

from groups import together
from tokendrop.launch.collectives import all_do, gather_on_rank_0, patient_group
from tokendrop.track.journal import LEDGER, Journal, read_ledger
from tokendrop.train.report import StepReport

STEPS, EACH = 3, 2


def test_one_process_alone_is_rank_0() -> None:
    assert gather_on_rank_0("own") == ["own"]


def test_what_one_rank_raises_all_do_and_none_waits_for_it() -> None:
    with patient_group() as group:
        assert all_do(lambda: "own", group) == ["own"]
    together(3, work_together)


def work_together() -> None:
    rank = dist.get_rank()
    with patient_group() as group:
        assert all_do(lambda: 2 * rank, group) == [0, 2, 4]
        with pytest.raises(ZeroDivisionError):
            all_do(lambda: 1 // (rank - 1), group)
        assert all_do(lambda: rank, group) == [0, 1, 2]


def test_rank_0_writes_the_ledger_of_a_group_and_no_other_rank_does(tmp_path: Path) -> None:
    together(3, record, tmp_path)
    rows = [(row["step"], row["rank"], row["sample_ids"]) for row in read_ledger(tmp_path)]
    assert rows == [(step, rank, ids_of(step, rank)) for step in range(1, STEPS + 1) for rank in range(3)]
    assert len(list((tmp_path / LEDGER).iterdir())) == 1


def ids_of(step: int, rank: int) -> list[int]:
    return [100 * step + EACH * rank + place for place in range(EACH)]


def record(run: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    numbers = dict.fromkeys(("loss", "grad_norm", "lr", "flops", "data_time_s", "step_time_s"), 1.0)
    counts = dict.fromkeys(("kept_length", "tokens", "layer_tokens"), 1)
    journal = Journal(run, rank=rank, world_size=world_size, start=0, gather=gather_on_rank_0)
    for step in range(1, STEPS + 1):
        report = StepReport(step=step, world_size=world_size, val_loss=None, **numbers, **counts)
        journal.record(report, ids_of(step, rank))
    journal.commit(STEPS)
    gathered = gather_on_rank_0(rank)
    assert gathered == ([*range(world_size)] if rank == 0 else [])
