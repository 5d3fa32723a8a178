"""Passes before the first step: they leave nothing behind, and no step after them compiles."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from attempts import lone_worker
from forks import JOB, trained, write_data
from groups import together, train_until
from tiny import assert_same, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.schedule.shapes import distinct, layer_shapes
from tokendrop.track.journal import Journal, MetricsTail, read_events, read_steps
from tokendrop.track.run_folder import describe_run
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.loop import TrainComponents, start_step, validate
from tokendrop.train.reader import load_weights
from tokendrop.train.warm_up import warm_up

STRATEGIES = ("ddp", "fsdp")
STEPS = 9
DEFAULT_LIMIT = 8  # graphs of a layer, in torch
MANY = {"kind": "linear", "start": 3, "until": "80%", "increment": 2}
FEW = {"kind": "linear", "start": 5, "until": "80%", "increment": 4}
GROWS: dict[str, Any] = {"train__micro_batch": 2, "train__tokens_per_micro_batch": 24}
AGAIN: dict[str, Any] = {"train__micro_batch": 4, "train__activation_checkpointing": "0.45 MB"}
CASES: dict[str, dict[str, Any]] = {
    "many lengths": {"drop__schedule": MANY},
    "rotary, no layer whole": {
        "drop__schedule": MANY,
        "model__positions": "rotary",
        "drop__full_length_layers": "none",
    },
    "micro batches that grow": {"drop__schedule": MANY, **GROWS},
    "micro batches of one": {"drop__schedule": MANY, **GROWS, "train__micro_batch": 1},
    "a first length of one": {"drop__schedule": MANY | {"start": 1}},
    "layer by layer": {"drop__schedule": MANY, "drop__by_layer": {"2": MANY | {"start": 6}}},
    "cut": {"drop": {"method": "sequence_warmup", "schedule": MANY}, **GROWS},
    "by token loss": {"drop": {"method": "token_bypass", "schedule": MANY}},
    "dropout": {"drop__schedule": MANY, "model__dropout": 0.1, "train__activation_checkpointing": True},
    "computed again where long": {"drop__schedule": MANY, **AGAIN},
    "static, computed again where long": {"drop__schedule": FEW, "train__compile": "static", **AGAIN},
    "static, micro batches that grow": {"drop__schedule": FEW, "train__compile": "static", **GROWS},
    "static, cut": {"drop": {"method": "sequence_warmup", "schedule": MANY}, "train__compile": "static", **GROWS},
    "static, layer by layer": {
        "drop__schedule": MANY,
        "drop__by_layer": {"2": MANY | {"start": 4}},
        "train__compile": "static",
    },
    "static, buckets": {"drop__schedule": MANY | {"increment": 1}, "drop__buckets": 3, "train__compile": "static"},
}


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Runs what Dynamo captures as it is, and keeps the time of each graph; Dynamo starts and ends empty."""
    found: list[float] = []

    def as_it_is(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        found.append(time.time())
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=as_it_is))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other at every small product
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=DEFAULT_LIMIT):
        yield found
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def job(**changes: Any) -> ExperimentConfig:
    return experiment(**{"train__length": f"{STEPS} steps", "train__compile": True} | changes)


def steps(config: ExperimentConfig, parts: TrainComponents, start: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, in training and on held-out rows, and weights."""
    losses = []
    for step in range(start, STEPS):
        losses.append(start_step(config, config.plan, parts, step).read()[0].loss)
        if step % 5 == 0 or step + 1 == STEPS:
            losses.append(validate(parts)[0])
    return losses, dict(parts.engine.model.state_dict())


@pytest.mark.parametrize(
    ("case", "start"), [*((case, 0) for case in CASES), ("dropout", 5), ("static, micro batches that grow", 5)]
)
def test_no_step_compiles_and_none_shows_what_ran_before(captures: list[float], case: str, start: int) -> None:
    config = job(**CASES[case])
    assert case != "static, layer by layer" or len(layer_shapes(config.plan)) > DEFAULT_LIMIT
    some_again = "computed again where long" in case
    assert len({one.recomputes for one in config.plan.segments}) == 1 + some_again
    losses, weights = steps(config, lone_worker(config), start)

    torch._dynamo.reset()
    warm = lone_worker(config)
    warm_up(config, warm, start=start)
    captures.clear()
    with torch.compiler.set_stance("fail_on_recompile"):
        after, weights_after = steps(config, warm, start)
    assert not captures
    assert after == losses
    assert_same(weights_after, weights)


@pytest.mark.parametrize("case", ["static, cut", "static, micro batches that grow"])
def test_static_graphs_are_one_for_each_shape_and_one_of_evaluation(captures: list[float], case: str) -> None:
    config = job(**CASES[case])
    warm_up(config, lone_worker(config), start=0)
    assert len(captures) == len(layer_shapes(config.plan)) + 1


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_cuda_graph_is_recorded_on_its_second_pass(cuda_graphs: bool) -> None:
    config = job(**CASES["static, buckets"])
    parts = lone_worker(config)
    parts.engine.cuda_graphs = cuda_graphs
    with patch.object(parts.engine, "forward", wraps=parts.engine.forward) as forward:
        warm_up(config, parts, start=0)
    kinds = len(distinct(config.plan, start=0, world_size=1))
    evaluated = len({0, len(parts.batches.validation()) - 1})
    assert forward.call_count == (kinds + evaluated) * (2 if cuda_graphs else 1)


@pytest.mark.parametrize("case", ["micro batches that grow", "by token loss", "dropout"])
def test_a_worker_is_as_it_was(case: str) -> None:
    config = job(**CASES[case])
    parts = lone_worker(config)
    model, before = parts.engine.model, torch.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    scores = {} if parts.scores is None else parts.scores.state()
    warm_up(config, parts, start=0)
    assert_same(dict(model.state_dict()), weights)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(optimizer.state for optimizer in parts.engine.optimizers)
    assert_same({} if parts.scores is None else parts.scores.state(), scores)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_a_worker_compiles_before_its_first_step_and_says_how_long_where_workers_change(
    captures: list[float], tmp_path: Path
) -> None:
    config = experiment(**{**JOB, "train__compile": True, "train__precision": "fp32"})
    run, data = tmp_path / "run", write_data(tmp_path / "data")
    run.mkdir()
    describe_run(run, config, data)
    Journal(run, rank=0, world_size=2, start=0).pause(0, checkpoint_s=1.0)
    trained(run, config, data)
    first = next(line for line in MetricsTail(run).read() if line.get("step") == 1)
    assert max(captures) < first["time"] - first["step_time_s"]
    (resize,) = (line for line in read_events(run) if "resize_at" in line)
    assert max(captures) - min(captures) < resize["parts_s"]["compile"] < resize["pause_s"]
    assert [*resize["parts_s"]][-2:] == ["compile", "first step"]


def test_a_run_that_is_done_needs_none(captures: list[float]) -> None:
    config = job()
    warm_up(config, lone_worker(config), start=STEPS)
    assert not captures


def shared(strategy: str) -> ExperimentConfig:
    return experiment(train__strategy=strategy, train__micro_batch=1, train__tokens_per_micro_batch=20)


def both_ways(folder: Path) -> None:
    """What each worker of the group does."""
    for strategy in STRATEGIES:
        for warms in (False, True):
            train_until(shared(strategy), folder / f"{strategy} {warms}", 6, warms=warms)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    together(2, both_ways, folder)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_workers_train_the_same_bit_for_bit(runs: Path, strategy: str) -> None:
    assert {segment.micro_batch for segment in shared(strategy).plan.segments} == {4, 2, 1}
    found = []
    for warms in (False, True):
        run = runs / f"{strategy} {warms}"
        model = shared(strategy).task.build(shared(strategy)).build_model(seed=0).double()
        load_weights(model, committed(run / CHECKPOINTS)[-1])
        rows = [[row[key] for key in ("step", "loss", "grad_norm", "val_loss")] for row in read_steps(run)]
        found.append((rows, dict(model.state_dict())))
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) == 6
    assert_same(found[0][1], found[1][1])
