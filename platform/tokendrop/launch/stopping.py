"""An end within seconds of Ctrl-C, also where Python can't look at it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from select import select

STOPPED = 130  # exit code
_GRACE_S = 8.0
_GO_ON = b"\0"  # no signal's number
_SAVE_S = 6.0  # of it, for a run's workers to save a checkpoint and end


@contextmanager
def stopping_in_time() -> Iterator[None]:
    """Within the block, end this process some seconds after SIGINT or SIGTERM if it has not ended by then.

    Python handles a signal between two of its own instructions; a wait inside of Ray or the training of a vocabulary
    may be one instruction that takes minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told)
    threading.Thread(target=_end_after_signal, args=(heard,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)


def _end_after_signal(heard: int) -> None:
    while number := os.read(heard, 1):
        if number[0] in (signal.SIGINT, signal.SIGTERM) and not _is_called_off(heard):
            print("tokendrop: stopped", file=sys.stderr, flush=True)
            os._exit(STOPPED)
    os.close(heard)


def _is_called_off(heard: int) -> bool:
    """Whether `go_on` is called within the grace."""
    deadline = time.monotonic() + _GRACE_S
    while (left := deadline - time.monotonic()) > 0:
        if select([heard], [], [], left)[0]:
            number = os.read(heard, 1)
            if number == _GO_ON:
                return True
            if not number:  # the block has ended, and the process is about to
                time.sleep(max(0.0, deadline - time.monotonic()))
    return False


def go_on() -> None:
    """Within a block of `stopping_in_time`, in the main thread: a KeyboardInterrupt was dealt with, and is no end."""
    told = signal.set_wakeup_fd(-1)
    if told != -1:
        signal.set_wakeup_fd(told)
        os.write(told, _GO_ON)


def run_until_stopped(work: Callable[[], None], *, stop: Callable[[], None]) -> None:
    """Do the work in a thread of its own; when this one is interrupted, call `stop` and let the work end in time.

    Raises:
        BaseException: what the work raised; KeyboardInterrupt where this thread was interrupted.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        done.result()
    except KeyboardInterrupt:
        stop()
        with suppress(BaseException):  # an impatient second Ctrl-C among them
            done.result(timeout=_SAVE_S)
        raise
