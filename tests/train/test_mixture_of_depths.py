"""Mixture of depths in the loop: a router that every strategy trains alike, and that checkpoints hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attempts import lone_worker
from groups import together, train_until
from sharing import HAS_DEEPSPEED
from tiny import TOKENS, assert_same, experiment, gpt
from tokendrop.config.drop import MixtureOfDepths
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.task import CausalLm
from tokendrop.errors import UserError
from tokendrop.method import Uniform
from tokendrop.track.journal import read_steps
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS, step_name
from tokendrop.train.dropping import attach_method, with_added_loss
from tokendrop.train.engines.deepspeed import DeepSpeedEngine
from tokendrop.train.initial import CheckpointWeights
from tokendrop.train.loop import accumulate
from tokendrop.train.worker import build_engine

STEPS = 4
KEY = ("loss", "grad_norm", "val_loss", "layer_tokens", "kept_length", "lr")
CPU = torch.device("cpu")
DROP = {"method": "mixture_of_depths", "router_loss": 0.5, "schedule": {"kind": "constant", "kept": 5}}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def job(strategy: str = "ddp", precision: str = "fp64", **changes: Any) -> ExperimentConfig:
    how = {"train__strategy": strategy, "train__precision": precision, "train__micro_batch": 2}
    how |= {"train__tokens_per_micro_batch": 20}  # 4 sequences at a time, but where a worker has 2
    if strategy.startswith("zero"):
        how |= {"train__strategy": "deepspeed", "train__zero_stage": int(strategy[-1])}
    every = {"train__length": f"{STEPS} steps", "evaluate__every": "2 steps", "checkpoint__every": "2 steps"}
    return experiment(train__warmup="0 steps", drop={**DROP}, **every, **how, **changes)


def runs_of(workers: int, folder: Path) -> None:
    """What each worker of a group does."""
    for strategy in ("ddp", "fsdp") if workers > 1 else ("ddp",):
        train_until(job(strategy), folder / f"{strategy} {workers}", STEPS)
    if workers == 2 and HAS_DEEPSPEED:
        DeepSpeedEngine.whole_below = 0
        for strategy in ("ddp", "zero 1", "zero 3"):
            train_until(job(strategy, "fp32"), folder / f"{strategy} in fp32", STEPS)


def runs_that_stop(stop: int, folder: Path) -> None:
    """The same run, up to a step; it goes on where it was left."""
    train_until(job(), folder / "ddp 1 again", stop)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture_of_depths")
    for workers in (1, 2, 4):
        together(workers, runs_of, workers, folder)
    return folder


def column(run: Path, key: str) -> np.ndarray:
    return np.array([row[key] for row in read_steps(run) if row[key] is not None])


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_losses_and_gradients_are_those_of_one_worker(runs: Path, strategy: str, workers: int) -> None:
    for key in KEY:
        ours, theirs = (column(runs / name, key) for name in (f"{strategy} {workers}", "ddp 1"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, err_msg=key)


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed: pip install 'tokendrop[deepspeed]'")
@pytest.mark.parametrize("stage", [1, 3])
def test_zero_trains_the_router_as_ddp_does(runs: Path, stage: int) -> None:
    for key in ("loss", "grad_norm", "val_loss"):
        ours, theirs = (column(runs / f"{name} in fp32", key) for name in (f"zero {stage}", "ddp"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=key)


def test_a_run_that_was_stopped_ends_with_the_same_bits(runs: Path) -> None:
    for stop in (3, STEPS):  # the third step was not saved, and is done again
        together(1, runs_that_stop, stop, runs)
    for key in KEY:
        assert list(column(runs / "ddp 1 again", key)) == list(column(runs / "ddp 1", key)), key
    found = []
    for name in ("ddp 1", "ddp 1 again"):
        engine, _ = build_engine(job(), CPU)
        checkpoints = Checkpoints(runs / name / CHECKPOINTS, keep=9, meta={})
        assert checkpoints.load(engine, runs / name / CHECKPOINTS / step_name(STEPS)) == STEPS
        found.append(dict(engine.model.state_dict()))
    assert_same(*found)
    first, _ = build_engine(job(), CPU)
    assert all(not torch.equal(found[0][name], one) for name, one in first.model.state_dict().items())


def gradients_of(config: ExperimentConfig, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of a step."""
    parts = lone_worker(config, **more)
    loss, _, _ = accumulate(config, config.plan, parts, 0)
    return loss, {name: one.grad for name, one in parts.engine.model.named_parameters() if one.grad is not None}


def test_the_loss_that_is_told_is_the_tasks_and_the_routers_has_gradients() -> None:
    one, other = (gradients_of(job(drop__router_loss=weight)) for weight in (0.5, 1.0))
    assert one[0] == other[0]
    changed = {name for name in one[1] if not torch.equal(one[1][name], other[1][name])}
    assert {"router.scores.1.weight", "router.scores.3.bias", "blocks.0.attention.qkv.weight"} <= changed
    assert "blocks.3.mlp.down.bias" not in changed  # no router is behind it


def test_other_methods_keep_the_tasks_loss_as_it_is() -> None:
    config = experiment()
    _, dropping = build_engine(config, CPU)
    loss = CausalLm().build(config).loss
    assert with_added_loss(loss, dropping) is with_added_loss(loss, None) is loss


def test_the_plan_counts_the_tokens_that_layers_run_on_and_the_routers_flops() -> None:
    plan, plain = job().plan, experiment(drop={"method": "none"}, train__length=f"{STEPS} steps").plan
    assert plan.routes.spans == ((1, 1), (3, 3))
    assert plan.layer_tokens(STEPS) == STEPS * 8 * 2 * (TOKENS + 5)
    tokens = {"method": "random_ltd", "schedule": DROP["schedule"], "full_length_layers": [0, 2]}
    same = experiment(drop=tokens, train__length=f"{STEPS} steps", train__warmup="0 steps").plan
    assert plan.layer_tokens(STEPS) == same.layer_tokens(STEPS)
    of_routers = 3 * 2 * 16 * TOKENS * 2  # forward and twice that backward; two layers
    assert plan.flops(STEPS) - same.flops(STEPS) == STEPS * 8 * of_routers
    assert plan.flops_full == plain.flops(STEPS)


def test_layers_run_on_as_many_tokens_as_the_plan_says() -> None:
    config = job(drop__schedule={"kind": "linear", "start": 4, "until": "80%", "increment": 3})
    parts = lone_worker(config)
    ran: dict[int, set[int]] = {number: set() for number in range(4)}
    for number, block in enumerate(parts.engine.model.blocks):
        block.register_forward_pre_hook(lambda _, args, number=number: ran[number].add(args[0].shape[1]))
    for step in range(STEPS):
        accumulate(config, config.plan, parts, step)
        kept = config.plan.at(step).kept_by_layer
        assert ran == {number: {kept.get(number, TOKENS)} for number in range(4)}
        for lengths in ran.values():
            lengths.clear()


def test_a_run_may_begin_with_weights_that_have_a_router_or_none(runs: Path, tmp_path: Path) -> None:
    initial = CheckpointWeights(runs / "ddp 1")
    expected = initial.weights(["router.scores.1.weight", "blocks.1.mlp.up.weight"])
    with_router, _ = build_engine(job(), CPU, initial=initial)
    without, _ = build_engine(experiment(), CPU, initial=initial)
    for name, value in expected.items():
        assert torch.equal(with_router.model.state_dict()[name], value)
    assert "router.scores.1.weight" not in without.model.state_dict()
    together(1, train_until, experiment(train__micro_batch=2, checkpoint__every="1 steps"), tmp_path / "plain", 2)
    new, _ = build_engine(job(), CPU, initial=CheckpointWeights(tmp_path / "plain"))
    random, _ = build_engine(job(), CPU)
    names = [name for name in new.model.state_dict() if name.startswith("router.")]
    assert len(names) == 4
    assert all(torch.equal(new.model.state_dict()[name], random.model.state_dict()[name]) for name in names)


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ({"every": 0}, "every: want at least 1, for every layer, got 0"),
        ({"every": 5}, "drop.every: want at most 4, the model's layers, got 5"),
        ({"router_loss": 0.0}, "router_loss: want a number above 0, got 0"),
        ({"by_layer": {"0": {"kind": "constant", "kept": 3}}}, "layer 0 sees every token"),
    ],
)
def test_a_mistake_is_named(drop: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        experiment(drop=DROP | drop)


@pytest.mark.parametrize("name", ["bert_tiny", "vit_tiny"])
def test_models_that_are_not_causal_are_refused(name: str, complaint) -> None:
    path = Path(__file__).parents[2] / "jobs" / "pretrain" / f"{name}.yaml"
    said = complaint("plan", path, "drop={method: mixture_of_depths}")
    assert "drop.method: 'mixture_of_depths' wants a causal model, of kind gpt, not" in said


@pytest.mark.parametrize("says", [False, True])
def test_a_method_that_is_wrong_about_its_router_is_told(says: bool) -> None:
    """Runs are planned, loaded and exported by what the method says of itself."""
    config, model = job(), gpt()
    router = config.drop.selector_of(width=16, layers=4, seed=1)
    made = {"learns": says, "selector_of": lambda self, **_: Uniform() if says else router}
    drop = type("Wrong", (MixtureOfDepths,), made)(**{**DROP, "schedule": config.drop.schedule})
    with pytest.raises(UserError, match=rf"^drop\.method: .* learned router; want `learns = {not says}` in its class$"):
        attach_method(replace(config, drop=drop), model, model.blocks)
