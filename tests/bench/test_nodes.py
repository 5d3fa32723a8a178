"""What a cluster bills: nodes that are there or asked for, times how long."""

import shutil
import threading
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.bench.nodes import Held, NodeMeter, held_now, node_seconds, node_start_s
from tokendrop.launch.local_nodes import ENDED, LOG

counts = st.tuples(st.floats(0.1, 5), st.integers(0, 4), st.integers(0, 4))


def looks_of(steps: list[tuple[float, int, int]]) -> list[Held]:
    times = accumulate((seconds for seconds, _, _ in steps), initial=0.0)
    return [Held(time, there, coming) for time, (_, there, coming) in zip(times, [*steps, (0, 0, 0)], strict=True)]


@given(st.lists(counts, min_size=1, max_size=20))
def test_node_seconds_are_the_nodes_of_each_moment_whether_there_or_coming(steps) -> None:
    looks = looks_of(steps)
    assert node_seconds(looks) == pytest.approx(sum(s * (there + coming) for s, there, coming in steps))
    for cut in range(1, len(looks)):
        parts = node_seconds(looks[: cut + 1]) + node_seconds(looks[cut:])
        assert node_seconds(looks) == pytest.approx(parts)


def test_a_node_takes_from_when_it_is_asked_for_to_when_it_is_there() -> None:
    looks = looks_of([(3, 0, 0), (2, 0, 1), (4, 0, 2), (9, 1, 1), (1, 2, 0)])
    assert node_start_s(looks) == 6
    assert node_start_s(looks[:2]) == node_start_s([]) == 0


def test_a_node_is_coming_from_when_it_has_a_folder_until_its_ray_is_up(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        assert held_now(tmp_path)[1:] == (0, number)  # the last one has said nothing yet
        (tmp_path / str(number) / LOG).write_text("Local node IP: 127.0.0.3\n")
    (tmp_path / "1" / LOG).write_text("Local node IP: 127.0.0.3\nRay runtime started.\n")
    (tmp_path / ENDED).write_text("Ray runtime started.\n")
    assert held_now(tmp_path)[1:] == (1, 2)


def test_a_meter_counts_until_the_last_node_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokendrop.bench.nodes._EVERY_S", 0.01)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / LOG).touch()
    meter = NodeMeter(partial(held_now, tmp_path))
    goes = threading.Timer(0.3, shutil.rmtree, [tmp_path / "1"])
    with meter.running():
        goes.start()  # as an idle node does, after the run
    assert not (tmp_path / "1").exists()
    assert meter.looks[-1][1:] == (0, 0)
    assert 0.2 < node_seconds(meter.looks) < 3
