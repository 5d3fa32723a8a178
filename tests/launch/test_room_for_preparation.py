"""Training beside its preparation: only where that keeps a core, by the nodes that there are at the moment."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tokendrop.launch.prepare import keeps_a_core
from tokendrop.launch.room import count_places

NODES = st.lists(
    st.fixed_dictionaries({"CPU": st.sampled_from([1.0, 2.0, 3.0, 4.5])}, optional={"GPU": st.integers(0, 3)}),
    max_size=3,
)
EACH = st.fixed_dictionaries(
    {"CPU": st.sampled_from([0.5, 1.0, 1.5, 2.0])}, optional={"GPU": st.sampled_from([1.0, 0.5])}
)


@given(NODES, EACH, st.integers(1, 6))
def test_a_core_is_kept_however_the_workers_are_spread(nodes, each, workers):
    fits = [range(count_places([node], each) + 1) for node in nodes]
    spread = [counts for counts in product(*fits) if sum(counts) <= workers]
    left = [[node["CPU"] - count * each["CPU"] for node, count in zip(nodes, counts, strict=True)] for counts in spread]
    assert keeps_a_core(nodes, each, workers=workers) == all(any(cpus >= 1 for cpus in one) for one in left)


@given(NODES, NODES, EACH, st.integers(1, 6))
def test_more_nodes_never_take_the_core_away(nodes, more, each, workers):
    if keeps_a_core(nodes, each, workers=workers):
        assert keeps_a_core(nodes + more, each, workers=workers)


def test_a_head_without_cores_keeps_none_and_a_node_with_gpus_that_comes_does():
    head, node, each = {}, {"CPU": 96.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}
    assert not keeps_a_core([head], each, workers=64)
    assert keeps_a_core([head, node], each, workers=64)
