"""A Ctrl-C that was dealt with ends nothing later; a head that nothing leads to is gone."""

import errno
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tokendrop.launch import head_watch
from tokendrop.launch.head_watch import HeadWatch

SCRIPT = """
import os, signal, sys, time
from tokendrop.launch import stopping
stopping._GRACE_S = 0.5
with stopping.stopping_in_time():
    for deals_with in sys.argv[1:]:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            if deals_with == "yes":
                stopping.go_on()
        time.sleep(1)
print("done")
"""


@pytest.mark.parametrize(
    ("interrupts", "code", "out"),
    [("yes", 0, "done\n"), ("yes yes", 0, "done\n"), ("no", 130, ""), ("yes no", 130, "")],
)
def test_an_interrupt_that_was_dealt_with_is_no_end(interrupts: str, code: int, out: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *interrupts.split()], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out)


@pytest.mark.parametrize(
    ("error", "is_gone"),
    [
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), True),
        (OSError(errno.EMFILE, "Too many open files"), False),
    ],
)
def test_a_head_is_gone_once_nothing_leads_to_it(
    error: OSError, is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exited, asked = threading.Event(), iter(range(1000))

    def connect(address: tuple[str, int], timeout: float) -> SimpleNamespace:
        if next(asked):
            raise error
        return SimpleNamespace(close=lambda: None)

    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setattr(head_watch, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(head_watch, "is_on_this_machine_alone", lambda: True)
    monkeypatch.setattr(head_watch, "socket", SimpleNamespace(create_connection=connect))
    monkeypatch.setattr(head_watch, "_POLL_S", 0.01)
    monkeypatch.setattr(head_watch, "_LOST_ALONE_S", 0.05)
    monkeypatch.setattr(HeadWatch, "_exit", lambda self, error: exited.set())
    with HeadWatch():
        assert exited.wait(0.5 if not is_gone else 10) == is_gone
