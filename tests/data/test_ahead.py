"""Reading ahead: whatever is asked for is what comes, and what is asked for next is made meanwhile."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.data.read.prefetch import Prefetcher

keys = st.integers(0, 5)


@given(st.lists(st.tuples(keys, keys), max_size=20))
def test_each_key_gets_its_own_value_or_error_whatever_was_said_to_come_next(asked: list[tuple[int, int]]) -> None:
    def make(key: int) -> int:
        if key == 3:
            raise KeyError(key)
        return key * 10

    ahead = Prefetcher(make)
    for key, then in asked:
        if key == 3:
            with pytest.raises(KeyError, match="3"):
                ahead.get(key, then=then)
        else:
            assert ahead.get(key, then=then) == key * 10


def test_the_next_is_made_before_it_is_asked_for_and_once() -> None:
    made: list[int] = []
    is_made = threading.Event()

    def make(key: int) -> int:
        made.append(key)
        if key == 2:
            is_made.set()
        return key

    ahead = Prefetcher(make)
    assert ahead.get(1, then=2) == 1
    assert is_made.wait(10)
    assert ahead.get(2, then=3) == 2
    assert made.count(2) == 1


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    ahead = Prefetcher(str)
    ahead.get(1, then=2)
    (thread,) = set(threading.enumerate()) - before
    del ahead
    thread.join(10)
    assert not thread.is_alive()
