"""An end within seconds of Ctrl-C, also where Python can't look at it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

STOPPED = 130  # exit code
_GRACE_S = 8.0
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
        if number[0] in (signal.SIGINT, signal.SIGTERM):
            time.sleep(_GRACE_S)
            print("tokendrop: stopped", file=sys.stderr, flush=True)
            os._exit(STOPPED)
    os.close(heard)


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
