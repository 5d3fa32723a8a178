"""Reading ahead: what is asked for next is made while the last is used."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


_ENDS_WITHIN_S = 1.0


class Prefetcher(Generic[Key, Value]):
    """Calls a function in a thread of its own, one call at a time.

    The thread is a daemon: a process that ends does not wait for rows that are not prepared yet. It does wait a moment
    for a call to end, for a thread that is within torch when Python ends takes the process down.
    """

    def __init__(self, make: Callable[[Key], Value]) -> None:
        self._asked: SimpleQueue[tuple[Key] | None] = SimpleQueue()
        self._made: SimpleQueue[Value | BaseException] = SimpleQueue()
        self._next: tuple[Key] | None = None
        thread = threading.Thread(target=_serve, args=(make, self._asked, self._made), daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._asked, thread)

    def get(self, key: Key, *, then: Key) -> Value:
        """What the function makes of a key; that of the key `then` is made from now on.

        Raises:
            BaseException: what the function raised.
        """
        if self._next != (key,):
            if self._next is not None:
                self._made.get()  # of another key
            self._asked.put((key,))
        value = self._made.get()
        self._next = (then,)
        self._asked.put(self._next)
        if isinstance(value, BaseException):
            raise value
        return value


def _end(asked: "SimpleQueue[tuple[Key] | None]", thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():
        thread.join(_ENDS_WITHIN_S)


def _serve(
    make: Callable[[Key], Value],
    asked: "SimpleQueue[tuple[Key] | None]",
    made: "SimpleQueue[Value | BaseException]",
) -> None:
    while (one := asked.get()) is not None:
        try:
            made.put(make(*one))
        except BaseException as error:  # for the thread that asks
            made.put(error)
