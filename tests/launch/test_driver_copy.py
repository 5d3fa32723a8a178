"""Rank 0 on a machine that does not see its driver's copy of the run, and what goes between the two."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.elastic.control import RunControl
from tokendrop.launch import separate_disks
from tokendrop.launch.driver_copy import DriverCopy
from tokendrop.launch.separate_disks import Relay, exchanging, sees
from tokendrop.track.decisions import DECISIONS
from tokendrop.track.journal import METRICS, note_loss
from tokendrop.track.run_home import write_home


def driver_folder(folder: Path) -> Path:
    run = folder / "driver"
    run.mkdir(exist_ok=True)
    (run / METRICS).write_bytes(b'{"driver_from": 0}\n')
    RunControl(run).reset()
    return run


@given(st.lists(st.tuples(st.binary(max_size=9), st.booleans()), max_size=9))
def test_what_comes_twice_is_in_the_record_once(tmp_path_factory, sent: list[tuple[bytes, bool]]) -> None:
    run = driver_folder(tmp_path_factory.mktemp("run"))
    copy, lines = DriverCopy(run), b""
    copy.begin("one")
    record = copy.record(0)
    assert copy.record(len(record)) == b""
    for more, is_heard in sent:
        lines += more
        copy.exchange("one", len(record), lines, {})
        if is_heard:  # else the answer was lost, and the same comes again, with more behind it
            record, lines = record + lines, b""
    assert (run / METRICS).read_bytes() == record + lines


def test_a_rank_0_that_others_have_followed_can_not_write_any_more(tmp_path: Path) -> None:
    copy = DriverCopy(run := driver_folder(tmp_path))
    copy.begin("one")
    begin = len(copy.record(0))
    copy.exchange("one", begin, b"mine\n", {})
    note_loss(run, "of it")
    after = (run / METRICS).read_bytes()
    for at, lines in ((begin, b"mine\nmore\n"), (begin + len(b"mine\n"), b"more\n"), (begin + len(b"mine\n"), b"")):
        with pytest.raises(RuntimeError, match="have gone on with it"):
            copy.exchange("one", at, lines, {DECISIONS: b"its own"})
    copy.begin("another")
    with pytest.raises(RuntimeError, match="have gone on with it"):
        copy.exchange("one", len(after), b"", {DECISIONS: b"its own"})
    assert (run / METRICS).read_bytes() == after
    assert not (run / DECISIONS).exists()
    copy.exchange("another", len(after), b"goes on\n", {})
    assert (run / METRICS).read_bytes() == after + b"goes on\n"


def until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


@pytest.mark.ray
def test_rank_0_hears_what_is_asked_and_the_driver_sees_what_it_writes(tmp_path: Path, ray_cluster: None) -> None:
    driver, worker = driver_folder(tmp_path), tmp_path / "worker"
    worker.mkdir()
    (driver / DECISIONS).write_text("none yet")
    actor: Any = ray.remote(num_cpus=0)(DriverCopy)
    copy = actor.remote(driver)
    with exchanging(relay := Relay(copy, worker)):
        assert (worker / METRICS).read_bytes() == (driver / METRICS).read_bytes()
        assert (worker / DECISIONS).read_text() == "none yet"
        asked, here = RunControl(driver), RunControl(worker)
        asked.train([("decision", 1.0)])
        asked.pause()
        assert until(lambda: here.pauses)
        assert here.timings == [("decision", 1.0)]
        asked.go_on(7)
        assert until(lambda: here.goes_on(7))
        asked.stop()
        assert until(lambda: here.is_stopped)

        with (worker / METRICS).open("ab") as live:
            live.write(b"a line\n")
        (worker / DECISIONS).write_text("made")
        had = relay.exchange()  # as before a commit: from now on the driver has it
        assert had == (driver / METRICS).stat().st_size
        assert (driver / METRICS).read_bytes() == (worker / METRICS).read_bytes()
        assert (driver / DECISIONS).read_text() == "made"
        with (worker / METRICS).open("ab") as live:
            live.write(b"the last line\n")
    assert (driver / METRICS).read_bytes() == (worker / METRICS).read_bytes()
    ray.kill(copy)


def test_the_copy_of_this_driver_is_seen_soon_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sees(tmp_path / "run", "one")
    write_home(tmp_path / "run", "s3://bucket/runs/run", "one")
    assert sees(tmp_path / "run", "one")
    monkeypatch.setattr(separate_disks, "_SEEN_WITHIN_S", 0.3)
    assert not sees(tmp_path / "run", "another")
    later = threading.Timer(0.1, write_home, (tmp_path / "run", "s3://bucket/runs/run", "the next"))
    monkeypatch.setattr(separate_disks, "_SEEN_WITHIN_S", 20)
    later.start()
    assert sees(tmp_path / "run", "the next")
