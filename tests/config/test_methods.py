"""Methods of dropping, as a job names them: the layers that they cover, and what the plan counts for them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from masking import loss_by_masking
from tiny import TOKENS, Rows, assert_same, experiment, gradients, rows_of
from tokendrop.config.drop import NoDropping, Tread
from tokendrop.launch.worker import build_engine
from tokendrop.method import routes_along
from tokendrop.train.loop import Parts, accumulate, validate

EXACT = 1e-12
LINEAR = {"kind": "linear", "start": 4, "until": "80%", "increment": 3}
METHODS = {
    "random_ltd": {"method": "random_ltd", "schedule": LINEAR, "whole_layers": "first"},
    "constant": {"method": "constant", "kept": 5},
    "tread": {"method": "tread", "schedule": LINEAR, "first": 1, "last": 2},
    "sequence_warmup": {"method": "sequence_warmup", "schedule": LINEAR},
}
SPANS = {
    "random_ltd": ((1, 1), (2, 2), (3, 3)),
    "constant": ((1, 1), (2, 2)),
    "tread": ((1, 2),),
    "sequence_warmup": ((0, 3),),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_counts_the_layer_tokens_and_flops_of_each_span(name: str) -> None:
    config = experiment(drop=METHODS[name])
    plan, spans = config.plan(), SPANS[name]
    assert config.drop.spans(4) == spans
    dropped = sum(last - first + 1 for first, last in spans)
    kept = [plan.at(step).kept_length for step in range(plan.steps)]
    assert kept[0] < TOKENS
    assert plan.layer_tokens(plan.steps) == 8 * sum((4 - dropped) * TOKENS + dropped * one for one in kept)
    assert plan.flops(plan.steps) == 8 * sum(
        counted_flops(dropped, one, cuts=name == "sequence_warmup") for one in kept
    )


def counted_flops(dropped: int, kept: int, *, cuts: bool, layers: int = 4, width: int = 16, vocab: int = 50) -> int:
    """Of one sequence: each matrix product forward, and twice that backward."""

    def layer(tokens: int) -> int:
        matrices = (3 + 1 + 4 + 4) * width**2
        return 2 * tokens * matrices + sum(2 * 2 * (query + 1) * width for query in range(tokens))

    head = 2 * (kept if cuts else TOKENS) * width * vocab
    return 3 * ((layers - dropped) * layer(TOKENS) + dropped * layer(kept) + head)


def test_a_constant_drop_is_random_ltd_with_one_kept_length() -> None:
    by_schedule = {"method": "random_ltd", "schedule": {"kind": "constant", "kept": 5}}
    assert experiment(drop=METHODS["constant"]).plan() == experiment(drop=by_schedule).plan()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sequence_warmup"])
@given(step=st.integers(0, 2))
@settings(max_examples=3)
def test_a_job_trains_on_the_routes_of_its_method(name: str, step: int) -> None:
    config = experiment(drop=METHODS[name])
    engine, dropping = build_engine(config, torch.device("cpu"))
    plain, _ = build_engine(experiment(drop={"method": "none"}), torch.device("cpu"))
    batch, kept = rows_of(range(3)), config.plan().at(step).kept_length
    assert dropping is not None
    dropping.draw(kept_length=kept, step=step, sample_ids=batch.sample_ids_B, sequence_length=TOKENS)
    rows = batch.input_ids_BS, batch.labels_BS
    loss = engine.model(*rows)
    expected = loss_by_masking(plain.model, routes_along(SPANS[name]), dropping, rows)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert_same(gradients(engine.model, loss), gradients(plain.model, expected), tolerance=EXACT)


def test_sequence_warmup_trains_on_the_first_tokens_of_each_sequence_and_validates_on_all() -> None:
    config = experiment(drop=METHODS["sequence_warmup"])
    plan, device = config.plan(), torch.device("cpu")
    engine, dropping = build_engine(config, device)
    assert dropping is None
    shapes: list[tuple[int, ...]] = []
    engine.model.register_forward_pre_hook(lambda _, rows: shapes.extend(tuple(one.shape) for one in rows))
    parts = Parts(engine=engine, dropping=None, batches=Rows(config), checkpoints=None, recorder=None, world_size=1)  # pyright: ignore[reportArgumentType] - neither is used by one step
    loss, _, _ = accumulate(config, plan, parts, 0)
    assert shapes == [(4, 4)] * 4
    short = [batch.cut(4) for batch in Rows(config).of_step(0)]
    expected = torch.stack([engine.evaluate(batch) for batch in short]).mean()
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    shapes.clear()
    assert validate(parts) > 0
    assert set(shapes) == {(4, TOKENS)}


@given(first=st.integers(-6, 6), last=st.integers(-6, 6), layers=st.integers(1, 6))
def test_a_span_that_is_not_there_is_refused(first: int, last: int, layers: int) -> None:
    drop = Tread(first=first, last=last)
    inside = -layers <= first < layers and -layers <= last < layers
    if inside and first % layers <= last % layers:
        assert drop.spans(layers) == ((first % layers, last % layers),)
    else:
        with pytest.raises(ValueError, match=f"drop: want first <= last of {layers} layers"):
            drop.spans(layers)


def test_without_a_method_nothing_is_dropped() -> None:
    assert experiment(drop={}).drop == NoDropping()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drop={method: tread, first: 3, last: 1}", "drop: want first <= last of 4 layers, got 3 and 1"),
        ("drop={method: tread, first: 1.5}", "drop.first: want a whole number"),
        ("drop={method: constant}", "drop.kept: this key is needed and missing"),
        ("drop={method: constant, kept: 0}", "drop.schedule: want a kept length of at least 1, got 0"),
        ("drop={method: constant, kept: 257}", "drop.schedule: a kept length of 257 is over"),
        (
            "drop={method: trade}",
            "drop.method: want one of none, random_ltd, constant, tread, sequence_warmup, got 'trade'",
        ),
        ("drop={schedule: {kind: constant, kept: 8}}", "drop: method is 'none', so this schedule would do nothing"),
    ],
)
def test_a_mistake_in_a_method_is_named(override: str, said: str, complaint) -> None:
    job = Path(__file__).parents[2] / "jobs" / "pretrain" / "bench.yaml"
    text = complaint("plan", job, "model.sequence_length=256", "model.layers=4", override)
    assert said in text
