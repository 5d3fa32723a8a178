"""Rank 0 on a machine that does not see its driver's copy of the run, and what goes between the two."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.elastic.control import RunControl
from tokendrop.launch.apart import Relay, exchanging, sees
from tokendrop.launch.driver_copy import DriverCopy
from tokendrop.track.decisions import DECISIONS
from tokendrop.track.journal import METRICS, note_loss
from tokendrop.track.run_home import write_home


def driver_folder(folder: Path) -> Path:
    run = folder / "driver"
    run.mkdir(exist_ok=True)
    (run / METRICS).write_bytes(b'{"driver_from": 0}\n')
    RunControl(run).reset()
    return run


@given(st.lists(st.tuples(st.binary(max_size=9), st.integers(1, 3)), max_size=9))
def test_what_comes_twice_is_in_the_record_once(tmp_path_factory, sent: list[tuple[bytes, int]]) -> None:
    run = driver_folder(tmp_path_factory.mktemp("run"))
    copy = DriverCopy(run)
    record, _ = copy.begin()
    for lines, times in sent:
        for _ in range(times):  # the answer was lost
            copy.exchange(len(record), lines, {})
        record += lines
    assert (run / METRICS).read_bytes() == record


def test_a_rank_0_that_others_have_followed_can_not_write_into_the_record(tmp_path: Path) -> None:
    copy = DriverCopy(run := driver_folder(tmp_path))
    begin = len(copy.begin()[0])
    copy.exchange(begin, b"mine\n", {})
    note_loss(run, "of it")
    after = (run / METRICS).read_bytes()
    for at, lines in ((begin, b"mine\nmore\n"), (begin + len(b"mine\n"), b"more\n")):
        with pytest.raises(RuntimeError, match="have gone on with it"):
            copy.exchange(at, lines, {})
    assert (run / METRICS).read_bytes() == after


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
        relay.exchange()  # as before a commit: from now on the driver has it
        assert (driver / METRICS).read_bytes() == (worker / METRICS).read_bytes()
        assert (driver / DECISIONS).read_text() == "made"
        with (worker / METRICS).open("ab") as live:
            live.write(b"the last line\n")
    assert (driver / METRICS).read_bytes() == (worker / METRICS).read_bytes()
    ray.kill(copy)


def test_the_copy_of_this_driver_is_seen_and_no_other(tmp_path: Path) -> None:
    assert not sees(tmp_path / "run", "one")
    write_home(tmp_path / "run", "s3://bucket/runs/run", "one")
    assert sees(tmp_path / "run", "one")
    assert not sees(tmp_path / "run", "another")
