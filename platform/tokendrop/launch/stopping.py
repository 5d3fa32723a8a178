"""An end within seconds of Ctrl-C, also where Python can't look at it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 130  # exit code
_GRACE_S = 8.0


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
