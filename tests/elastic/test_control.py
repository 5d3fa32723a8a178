"""What workers do with what the driver and the policy ask of them, whichever comes first."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.elastic.control import RunControl, WorkerControl


def workers(
    control: RunControl, world_size: int, *, must_save: Callable[[], bool] = lambda: False
) -> list[WorkerControl]:
    """Ranks that agree as a process group would: on what rank 0 says, all at once."""
    said = [0]
    barrier = threading.Barrier(world_size)

    def agree_as(rank: int):
        def agree(number: int) -> int:
            if rank == 0:
                said[0] = number
            barrier.wait(10)
            result = said[0]
            barrier.wait(10)
            return result

        return agree

    return [WorkerControl(control, rank=rank, agree=agree_as(rank), must_save=must_save) for rank in range(world_size)]


def next_of_all(group: list[WorkerControl], step: int, *, waits: bool, results: list[bool]) -> list[threading.Thread]:
    def one(worker: WorkerControl) -> None:
        results.append(worker.next(step, waits=waits))

    threads = [threading.Thread(target=one, args=(worker,), daemon=True) for worker in group]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture
def control(tmp_path: Path) -> RunControl:
    control = RunControl(tmp_path)
    control.reset()
    return control


@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_that_wait_go_on_when_they_are_told_to(control: RunControl, world_size: int) -> None:
    results: list[bool] = []
    threads = next_of_all(workers(control, world_size), 5, waits=True, results=results)
    threads[0].join(0.3)
    assert threads[0].is_alive()
    control.go_on(4)  # of an earlier wait
    threads[0].join(0.3)
    assert threads[0].is_alive()
    control.go_on(5)
    for thread in threads:
        thread.join(10)
    assert results == [True] * world_size


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_of_a_stopped_run_pause_and_leave(control: RunControl, world_size: int, waits: bool) -> None:
    group = workers(control, world_size)
    assert not any(worker.pause_requested(1) for worker in group)
    control.stop()
    assert [worker.pause_requested(2) for worker in group] == [True] + [False] * (world_size - 1)
    results: list[bool] = []
    for thread in next_of_all(group, 2, waits=waits, results=results):
        thread.join(10)
    assert results == [False] * world_size


def test_workers_that_must_save_go_on_by_themselves(control: RunControl) -> None:
    due = iter([True, False, False])
    (worker,) = workers(control, 1, must_save=lambda: next(due))
    assert worker.pause_requested(1)
    assert worker.pause_requested(2)  # a GPU pauses a step later
    assert worker.next(2, waits=False)
    assert not worker.pause_requested(3)


def test_rank_0_says_for_all_that_a_checkpoint_is_due(control: RunControl) -> None:
    group = workers(control, 3, must_save=lambda: True)
    assert [worker.pause_requested(1) for worker in group] == [True, False, False]


@pytest.mark.parametrize("due", [False, True])
def test_workers_at_a_planned_edge_leave_where_nobody_replaces_them(control: RunControl, due: bool) -> None:
    (worker,) = workers(control, 1, must_save=lambda: due)
    assert worker.pause_requested(1) == due
    assert not worker.next(1, waits=False, is_edge=True)


@given(orders=st.lists(st.sampled_from(["pause", "go on", "stop", "train", "reset"]), max_size=8))
def test_the_last_word_of_each_writer_counts(tmp_path_factory: pytest.TempPathFactory, orders: list[str]) -> None:
    control = RunControl(tmp_path_factory.mktemp("run"))
    control.reset()
    pauses = stopped = False
    for order in orders:
        match order:
            case "pause":
                control.pause()
                pauses = True
            case "go on":
                control.go_on(7)
                pauses = False
            case "train":
                control.train([("decision", 1.5)])
                pauses = False
                assert control.timings == [("decision", 1.5)]
            case "stop":
                control.stop()
                stopped = True
            case _:
                control.reset()
                pauses = stopped = False
        assert (control.pauses, control.is_stopped) == (pauses, stopped)
