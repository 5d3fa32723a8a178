"""Methods of dropping, as a job names them: the layers that they cover, and what the plan counts for them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attempts import lone_worker
from masking import loss_by_masking
from tiny import TOKENS, Rows, assert_same, experiment, gradients, rows_of
from tokendrop.config.drop import NoDropping, Tread
from tokendrop.config.layers import dropped_layers
from tokendrop.config.load import dump_job, load_job
from tokendrop.method import routes_along
from tokendrop.train.loop import accumulate, validate
from tokendrop.train.worker import build_engine

EXACT = 1e-12
BENCH = Path(__file__).parents[2] / "jobs" / "pretrain" / "bench.yaml"
FOUR = ("model.sequence_length=256", "model.layers=4")
LINEAR = {"kind": "linear", "start": 4, "until": "80%", "increment": 3}
METHODS = {
    "random_ltd": {"method": "random_ltd", "schedule": LINEAR, "full_length_layers": "first"},
    "constant": {"method": "constant", "kept": 5},
    "tread": {"method": "tread", "schedule": LINEAR, "first": 1, "last": 2},
    "sequence_warmup": {"method": "sequence_warmup", "schedule": LINEAR},
}
METHODS["by_layer"] = METHODS["random_ltd"] | {
    "by_layer": {2: {"kind": "constant", "kept": 9}, "-1": LINEAR | {"start": 2}}
}
SPANS = {
    "random_ltd": ((1, 1), (2, 2), (3, 3)),
    "constant": ((1, 1), (2, 2)),
    "tread": ((1, 2),),
    "sequence_warmup": ((0, 3),),
    "by_layer": ((1, 1), (2, 2), (3, 3)),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_counts_the_layer_tokens_and_flops_of_each_span(name: str) -> None:
    config = experiment(drop=METHODS[name])
    plan, spans = config.plan, SPANS[name]
    assert config.drop.spans(4) == plan.routes.spans == spans
    seen = [[plan.at(step).kept_by_layer.get(layer, TOKENS) for layer in range(4)] for step in range(plan.steps)]
    assert min(seen[0]) < TOKENS
    assert plan.layer_tokens(plan.steps) == 8 * sum(map(sum, seen))
    cut = [tokens[0] if name == "sequence_warmup" else TOKENS for tokens in seen]
    assert plan.flops(plan.steps) == 8 * sum(map(counted_flops, seen, cut))


def counted_flops(seen: list[int], cut: int, *, width: int = 16, vocab: int = 50) -> int:
    """Of one sequence: each matrix product forward, and twice that backward.

    Args:
        seen: tokens that each layer sees.
        cut: those that the head does.
    """

    def layer(tokens: int) -> int:
        matrices = (3 + 1 + 4 + 4) * width**2
        return 2 * tokens * matrices + sum(2 * 2 * (query + 1) * width for query in range(tokens))

    return 3 * (sum(map(layer, seen)) + 2 * cut * width * vocab)


def test_layers_follow_schedules_of_their_own_and_the_others_the_usual_one() -> None:
    plan = experiment(drop=METHODS["by_layer"]).plan
    kept = [plan.at(step).kept_by_layer for step in range(6)]
    assert [one[1] for one in kept] == [4, 4, 7, 10, 13, 16]
    assert [one[2] for one in kept] == [9] * 6
    assert [one[3] for one in kept] == [2, 5, 8, 11, 14, 16]
    assert [plan.at(step).kept_length for step in range(6)] == [5, 6, 8, 10, 12, 14]
    assert plan.segments[0].stop == 1


@given(st.integers(1, TOKENS), st.integers(1, TOKENS))
def test_one_schedule_for_every_layer_is_that_of_the_method(kept: int, other: int) -> None:
    drop = {"method": "random_ltd", "schedule": {"kind": "constant", "kept": other}}
    everywhere = {"1--2": {"kind": "constant", "kept": kept}}
    usual = drop | {"schedule": {"kind": "constant", "kept": kept}}
    few = {"train__warmup": "0 steps"}
    assert experiment(drop=drop | {"by_layer": everywhere}, **few).plan == experiment(drop=usual, **few).plan


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("{x: %s}", "drop.by_layer.x: want a layer or a range of layers, such as 5, -1 or 1-4"),
        ("{4: %s}", "drop.by_layer.4: want numbers of 4 layers, 0 to 3 or -4 to -1, the first one first"),
        ("{2-1: %s}", "drop.by_layer.2-1: want numbers of 4 layers"),
        ("{0: %s}", "drop.by_layer.0: layer 0 sees every token; want some of the layers 1-2"),
        ("{1: %s, 1-2: %s}", "drop.by_layer.1-2: layer 1 is in '1' too; want each layer in one key"),
        ("{1: %s, '1': %s}", "drop.by_layer.1: this key stands twice, as a number and as text"),
        ("{1: {kind: constant, kept: 300}}", "drop.by_layer.1: a kept length of 300 is over model.sequence_length=256"),
        ("{1: {kind: linear, start: 300, until: 9%%}}", "drop.by_layer.1: want 0 < start <= full"),
        ("{1: {kept: 3}}", "drop.by_layer.1.kind: this key is needed"),
        ("[1]", "drop.by_layer: want a mapping of keys"),
    ],
)
def test_a_mistake_in_a_layers_own_schedule_is_named(keys: str, said: str, complaint) -> None:
    by_layer = keys.replace("%s", "{kind: constant, kept: 8}").replace("%%", "%")
    schedule = "schedule: {kind: constant, kept: 9}"
    assert said in complaint("plan", BENCH, *FOUR, f"drop={{method: random_ltd, {schedule}, by_layer: {by_layer}}}")


def test_layers_that_share_their_kept_tokens_share_their_schedule(complaint) -> None:
    drop = "drop={method: tread, schedule: {kind: constant, kept: 9}, by_layer: {%s: {kind: constant, kept: 8}}}"
    said = "drop.by_layer.1: layers 1 to 2 share their kept tokens; want one schedule for all"
    assert said in complaint("plan", BENCH, *FOUR, drop % "1")
    assert load_job(BENCH, [*FOUR, drop % "1-2"]).plan.at(0).kept_length == 8


def test_a_layer_of_a_job_is_overridden_by_its_number(tmp_path: Path) -> None:
    drop = "drop={method: random_ltd, by_layer: {1: {kind: constant, kept: 8}}}"
    config = load_job(BENCH, [*FOUR, drop, "drop.by_layer.1.kept=9"])
    assert config.plan.at(0).kept_by_layer == {1: 9, 2: 256}
    (tmp_path / "again.yaml").write_text(dump_job(config))
    assert load_job(tmp_path / "again.yaml") == config


def test_a_constant_drop_is_random_ltd_with_one_kept_length() -> None:
    by_schedule = {"method": "random_ltd", "schedule": {"kind": "constant", "kept": 5}}
    assert experiment(drop=METHODS["constant"]).plan == experiment(drop=by_schedule).plan


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sequence_warmup"])
@given(step=st.integers(0, 2))
@settings(max_examples=3)
def test_a_job_trains_on_the_routes_of_its_method(name: str, step: int) -> None:
    config = experiment(drop=METHODS[name])
    engine, dropping = build_engine(config, torch.device("cpu"))
    plain, _ = build_engine(experiment(drop={"method": "none"}), torch.device("cpu"))
    batch, kept = rows_of(range(3)), config.plan.at(step).kept_by_route
    assert dropping is not None
    dropping.draw(kept_length=kept, step=step, sample_ids=batch.sample_ids_B, sequence_length=TOKENS)
    rows = batch.input_ids_BS, batch.labels_BS
    loss = engine.model(*rows)
    expected = loss_by_masking(plain.model, routes_along(SPANS[name]), dropping, rows)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert_same(gradients(engine.model, loss), gradients(plain.model, expected), tolerance=EXACT)


def test_sequence_warmup_trains_on_the_first_tokens_of_each_sequence_and_validates_on_all() -> None:
    config = experiment(drop=METHODS["sequence_warmup"])
    plan, components = config.plan, lone_worker(config)
    engine = components.engine
    assert components.dropping is None
    shapes: list[tuple[int, ...]] = []
    engine.model.register_forward_pre_hook(lambda _, rows: shapes.extend(tuple(one.shape) for one in rows))
    loss, _, _ = accumulate(config, plan, components, 0)
    assert shapes == [(4, 4)] * 4
    short = [batch.cut(4) for batch in Rows(config).of_step(0)]
    expected = torch.stack([engine.evaluate(batch).mean for batch in short]).mean()
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    shapes.clear()
    assert validate(components)[0] > 0
    assert set(shapes) == {(4, TOKENS)}


def test_sequence_warmup_at_full_length_is_the_plain_model_bit_for_bit() -> None:
    full = {"method": "sequence_warmup", "schedule": {"kind": "constant", "kept": TOKENS}}
    found = []
    for drop in (full, {"method": "none"}):
        config = experiment(drop=drop)
        components = lone_worker(config)
        loss, _, _ = accumulate(config, config.plan, components, 0)
        found.append((loss, {name: one.grad for name, one in components.engine.model.named_parameters()}))
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


@given(first=st.integers(-6, 6), last=st.integers(-6, 6), layers=st.integers(1, 6))
def test_a_span_that_is_not_there_is_refused(first: int, last: int, layers: int) -> None:
    drop = Tread(first=first, last=last)
    inside = -layers <= first < layers and -layers <= last < layers
    if inside and first % layers <= last % layers:
        assert drop.spans(layers) == ((first % layers, last % layers),)
    else:
        with pytest.raises(ValueError, match=f"drop: want first <= last of {layers} layers"):
            drop.spans(layers)


@pytest.mark.parametrize("spans", [[(0, 1), (1, 2)], [(2, 3), (0, 1)], [(1, 0)], [(-1, 0)], [(2, 4)]])
def test_spans_that_overlap_or_are_not_in_the_model_are_refused(spans: list[tuple[int, int]]) -> None:
    assert dropped_layers([(0, 1), (2, 2)], 4) == (0, 1, 2)
    assert dropped_layers([], 4) == ()
    with pytest.raises(ValueError, match="drop: want spans of"):
        dropped_layers(spans, 4)


def test_without_a_method_nothing_is_dropped() -> None:
    assert experiment(drop={}).drop == NoDropping()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drop={method: tread, first: 3, last: 1}", "drop: want first <= last of 4 layers, got 3 and 1"),
        ("drop={method: tread, first: 1.5}", "drop.first: want a whole number"),
        ("drop={method: constant}", "drop.kept: this key is needed and missing"),
        ("drop={method: constant, kept: 0}", "drop.kept: want a kept length of at least 1, got 0"),
        ("drop={method: constant, kept: 257}", "drop.kept: a kept length of 257 is over"),
        (
            "drop={method: trade}",
            "drop.method: want one of none, random_ltd, constant, tread, sequence_warmup, layer_dropout,"
            " token_bypass, mixture_of_depths, token_superposition, got 'trade'",
        ),
        ("drop={method: constant, kept: 8, schedule: {kind: constant, kept: 9}}", "drop: method 'constant' keeps"),
        ("drop={schedule: {kind: constant, kept: 8}}", "drop: method is 'none', so this schedule would do nothing"),
    ],
)
def test_a_mistake_in_a_method_is_named(override: str, said: str, complaint) -> None:
    assert said in complaint("plan", BENCH, *FOUR, override)
