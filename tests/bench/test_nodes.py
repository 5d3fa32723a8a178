"""What a cluster bills: nodes that are there or asked for, times how long."""

import threading
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.bench.nodes import Held, NodeMeter, held_now, node_seconds, node_start_s

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


def test_a_meter_counts_until_the_last_node_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokendrop.bench.nodes._EVERY_S", 0.01)
    nodes, ended = [1], threading.Event()

    def look() -> Held:
        status = {"nodes": [{"role": "head"}, *[{"role": "worker"}] * nodes[0]], "pending": 0}
        return held_now(status)

    meter = NodeMeter(look)
    goes = threading.Timer(0.3, lambda: (ended.set(), nodes.clear(), nodes.append(0)))
    with meter.running():
        goes.start()  # as an idle node does, after the run
    assert ended.is_set()
    assert meter.looks[-1].there == 0
    assert 0.2 < node_seconds(meter.looks) < 3
