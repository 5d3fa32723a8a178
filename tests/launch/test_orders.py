"""What a worker that waits is told, whichever of the two comes first."""

import threading
from collections.abc import Iterator

import pytest

from tokendrop.launch import orders
from tokendrop.launch.orders import Orders, go_on, pause, standing


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    """A worker that has begun at step 0."""
    mine = Orders()
    monkeypatch.setattr(orders, "ORDERS", mine)
    mine.begin(0, "cpu")
    yield mine
    go_on(10**9)


def waits(worker: Orders, step: int) -> threading.Thread:
    thread = threading.Thread(target=worker.wait, args=(step,), daemon=True)
    thread.start()
    return thread


def test_an_order_to_go_on_that_comes_before_the_wait_ends_it(worker: Orders) -> None:
    go_on(5)
    thread = waits(worker, 5)
    thread.join(5)
    assert not thread.is_alive()
    stands = standing()
    assert stands is not None
    assert (stands.done, stands.waits) == (5, False)


def test_an_order_to_go_on_from_an_earlier_step_ends_no_later_wait(worker: Orders) -> None:
    go_on(5)
    thread = waits(worker, 9)
    thread.join(0.1)
    assert thread.is_alive()
    stands = standing()
    assert stands is not None
    assert (stands.done, stands.waits) == (9, True)
    go_on(9)
    thread.join(5)
    assert not thread.is_alive()


def test_an_order_to_pause_holds_for_one_wait(worker: Orders) -> None:
    assert not worker.asked(1)
    pause()
    assert worker.asked(2)
    go_on(2)
    worker.wait(2)
    assert not worker.asked(3)
