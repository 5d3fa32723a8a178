"""How many graphs layers have that are compiled for each shape, and which jobs can't have them."""

import pytest
from hypothesis import given

from strategies import plans
from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.shapes import MOST_STATIC, distinct, layer_shapes

ADAPTIVE = {"kind": "adaptive", "start": 4, "increment": 4, "every": "1 steps", "budget": 0.6}
MANY = {"kind": "linear", "start": 3, "until": "80%", "increment": 1}
LONG = {"model__sequence_length": 32, "train__length": "100 steps", "train__compile": "static"}


@given(plans().filter(lambda plan: plan.routes.counts == "tokens"))
def test_shapes_are_those_of_every_layer_at_every_step(plan: RunPlan) -> None:
    found = set()
    for step in range(plan.steps):
        segment = plan.at(step)
        kept = segment.kept_by_layer
        tokens = {kept.get(layer, plan.shape.sequence_length) for layer in range(plan.shape.layers)}
        found |= {(segment.micro_batch, some, segment.recomputes) for some in tokens}
    assert layer_shapes(plan) == layer_shapes(plan, world_size=plan.batch.world_size) == found


@given(plans())
def test_each_kind_of_step_that_lies_ahead_is_there_once_and_none_of_the_past(plan: RunPlan) -> None:
    for start in {0, plan.steps // 2, plan.steps}:
        kinds = distinct(plan, start=start, world_size=1)
        ahead = [plan.at(step) for step in range(start, plan.steps)]
        found = [(size, one.kept, one.recomputes) for size, one in kinds]
        assert set(found) == {(plan.split(s, 1).micro_batch, s.kept, s.recomputes) for s in ahead}
        assert len(set(found)) == len(kinds)
        assert [one.start for _, one in kinds] == sorted(one.start for _, one in kinds)
        assert all(one in ahead for _, one in kinds)


def test_as_many_graphs_as_allowed_are_taken_and_one_more_is_refused() -> None:
    taken = {"drop__schedule": MANY, "drop__buckets": MOST_STATIC, **LONG}
    assert len(layer_shapes(experiment(**taken).plan)) == MOST_STATIC
    with pytest.raises(UserError, match=r"static wants at most 16 pairs .* has 17; want drop\.buckets, or true"):
        experiment(**taken | {"drop__buckets": MOST_STATIC + 1})
    assert experiment(**taken | {"train__compile": True, "drop__buckets": None}).train.compile is True


GRAPHS = {**LONG, "drop__schedule": MANY, "drop__buckets": 4, "train__cuda_graphs": True, "scaling__gpus_per_worker": 1}


def test_cuda_graphs_are_those_of_known_shapes_on_gpus_with_weights_that_stay() -> None:
    assert experiment(**GRAPHS).train.cuda_graphs
    assert experiment(**GRAPHS | {"scaling__workers": 2}).train.strategy == "ddp"
    for changes, said in (
        ({"train__compile": True}, r"^train\.cuda_graphs: want compile: static.* got True and 'ddp'"),
        ({"train__strategy": "fsdp"}, r"^train\.cuda_graphs: want compile: static.* got 'static' and 'fsdp'"),
        ({"scaling__gpus_per_worker": 0}, r"^train\.cuda_graphs: want scaling\.gpus_per_worker of at least 1"),
    ):
        with pytest.raises(UserError, match=said):
            experiment(**GRAPHS | changes)


def test_each_size_of_micro_batches_counts() -> None:
    few = {"drop__schedule": MANY, "drop__buckets": 14, **LONG}
    assert len(layer_shapes(experiment(**few).plan)) == 14
    with pytest.raises(UserError, match="pairs of micro batch and tokens that layers see, this plan has 17"):
        experiment(**few, train__micro_batch=1, train__tokens_per_micro_batch=40)


@pytest.mark.parametrize(
    ("drop", "lacking"),
    [
        ({"method": "random_ltd", "schedule": ADAPTIVE}, "its schedule"),
        ({"method": "mixture_of_depths"}, "method 'mixture_of_depths'"),
        ({"method": "layer_dropout", "keep": 0.5}, "method 'layer_dropout'"),
    ],
)
def test_shapes_that_are_not_known_before_are_refused(drop: dict[str, object], lacking: str) -> None:
    with pytest.raises(UserError) as error:
        experiment(drop=drop, train__compile="static")
    sentence = f"static wants shapes that are known before, which {lacking} lacks; want true"
    assert str(error.value) == f"train.compile: {sentence}"
