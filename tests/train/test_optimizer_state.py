"""Moments in bf16: what they are between steps and in checkpoints; updates are torch's own but for rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from groups import together, train_until
from strategies import MEASURED
from tiny import assert_same, experiment, gpt, loss_of, rows_of
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.launch.resume import settings
from tokendrop.schedule.device import STATE_BYTES
from tokendrop.schedule.scaling import change_s
from tokendrop.track.journal import read_steps
from tokendrop.train import optimizer_state
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.reader import CheckpointReader, load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OPTIMIZERS = ("adamw", "sgd", "muon")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def job(state: str, optimizer: str = "adamw", strategy: str = "ddp", **changes: object) -> ExperimentConfig:
    how = {"train__optimizer": optimizer, "train__strategy": strategy, "train__micro_batch": 2}
    return experiment(**how, train__optimizer_state=state, **changes)


def engine_of(config: ExperimentConfig, dtype: torch.dtype = torch.float32) -> DdpEngine:
    model = gpt(dtype=dtype)
    return DdpEngine(model, build_optimizers(model, config.train), dtype, loss=loss_of)


def step(engine: DdpEngine, number: int) -> None:
    engine.forward_backward(rows_of(range(8 * number, 8 * number + 8)), share=1.0, last_micro_batch=True)
    engine.step(lr=0.01, max_grad_norm=1.0)


def moments(engine: DdpEngine) -> list[torch.Tensor]:
    """All of them, by parameter and name."""
    states = [one.state[p] for one in engine.optimizers for group in one.param_groups for p in group["params"]]
    return [state[key] for state in states for key in MOMENTS if state.get(key) is not None]


@pytest.mark.parametrize("at_once", [1, 2000, optimizer_state._AT_ONCE])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_torchs_own_on_the_moments_that_were_kept(
    optimizer: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many parameters are updated at a time, and whatever the moments were."""
    monkeypatch.setattr(optimizer_state, "_AT_ONCE", at_once)
    ours, theirs = (engine_of(job(state, optimizer)) for state in ("bf16", "fp32"))
    for number in range(4):
        for engine in (ours, theirs):
            step(engine, number)
        assert_same(dict(ours.model.named_parameters()), dict(theirs.model.named_parameters()))
        assert {one.dtype for one in moments(ours)} == {torch.bfloat16}
        for kept, exact in zip(moments(ours), moments(theirs), strict=True):
            assert torch.equal(kept, exact.bfloat16())
            exact.copy_(kept)  # theirs goes on from what ours has kept
    assert len(moments(ours)) == len(moments(theirs)) > 0


def test_losses_are_those_of_exact_moments_to_a_twentieth_of_what_is_learned_and_to_a_hundredth_on_average() -> None:
    """Eight rows learned by heart, where small differences grow: here to 2.5%, and 0.2% on average."""
    curves = []
    for state in ("bf16", "fp32"):
        engine = engine_of(job(state), torch.float64)
        losses = []
        for _ in range(150):
            losses.append(engine.forward_backward(rows_of(range(8)), share=1.0, last_micro_batch=True).mean.item())
            engine.step(lr=0.003, max_grad_norm=1.0)
        curves.append(losses)
    bf16, exact = np.array(curves)
    learned = exact[0] - exact[-1]
    assert learned > 2.0
    assert 0 < np.abs(bf16 - exact).max() < 0.05 * learned
    assert abs((bf16 - exact).mean()) < 0.01 * learned


LEGS = {  # name: workers, the step that they train to, optimizer state and strategy, one leg after another
    "whole": [(1, 6, "bf16", "ddp")],
    "again": [(1, 3, "bf16", "ddp"), (1, 6, "bf16", "ddp")],
    "two": [(2, 6, "bf16", "ddp")],
    "fsdp": [(2, 6, "bf16", "fsdp")],
    "other strategies": [(2, 2, "bf16", "fsdp"), (1, 4, "bf16", "ddp"), (2, 6, "bf16", "fsdp")],
    "to fp32": [(1, 2, "bf16", "ddp"), (2, 4, "fp32", "fsdp"), (1, 6, "fp32", "ddp")],
    "from fp32": [(1, 2, "fp32", "ddp"), (2, 4, "bf16", "fsdp"), (1, 6, "bf16", "ddp")],
    "fp32": [(1, 6, "fp32", "ddp")],
}


def legs(number: int, workers: int, folder: Path) -> None:
    """What each worker of a group does: the leg of that number, of the runs in which so many workers have it."""
    for name, some in LEGS.items():
        if number < len(some) and some[number][0] == workers:
            _, stop, state, strategy = some[number]
            train_until(job(state, "adamw", strategy), folder / name, stop)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for number, workers in [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]:
        together(workers, legs, number, workers, folder)
    return folder


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_steps(run)]


def test_a_run_that_goes_on_is_an_uninterrupted_one_bit_for_bit(runs: Path) -> None:
    assert losses(runs / "again") == losses(runs / "whole")
    assert len(losses(runs / "whole")) == 6
    assert_same(weights(runs / "again"), weights(runs / "whole"))


@pytest.mark.parametrize("name", ["two", "fsdp", "other strategies"])
def test_neither_workers_nor_strategies_show(runs: Path, name: str) -> None:
    np.testing.assert_allclose(losses(runs / name), losses(runs / "whole"), rtol=1e-10)
    assert_same(weights(runs / name), weights(runs / "whole"), tolerance=1e-10)


@pytest.mark.parametrize("name", ["to fp32", "from fp32"])
def test_a_checkpoint_of_one_state_is_read_as_the_other(runs: Path, name: str) -> None:
    """Losses are at first those of the run that it was, then close to both; anew begun moments would be far off."""
    begun, other = ("whole", "fp32") if name == "to fp32" else ("fp32", "whole")
    assert losses(runs / name)[:2] == losses(runs / begun)[:2]
    apart = np.abs(np.array(losses(runs / begun)) - losses(runs / other)).max()
    assert np.abs(np.array(losses(runs / name)) - losses(runs / begun)).max() < 3 * apart < 0.01


@pytest.mark.parametrize("name", LEGS)
def test_checkpoints_hold_moments_as_they_are_kept(runs: Path, name: str) -> None:
    state = LEGS[name][-1][2]
    stored = CheckpointReader(committed(runs / name / CHECKPOINTS)[-1]).metadata.state_dict_metadata
    found = {key: one.properties.dtype for key, one in stored.items() if isinstance(one, TensorStorageMetadata)}
    moments = {dtype for key, dtype in found.items() if key.endswith(("exp_avg", "exp_avg_sq"))}
    assert moments == {torch.bfloat16 if state == "bf16" else torch.float64}
    assert {dtype for key, dtype in found.items() if key.startswith("model.")} == {torch.float64}


def test_moments_are_kept_in_bf16_from_where_they_are_read(tmp_path: Path) -> None:
    """Before a step is done: what is read is saved as it was, and takes no more memory."""
    first, second = (engine_of(job("bf16")) for _ in range(2))
    step(first, 0)
    state = first.optimizers[0].state_dict()
    second.optimizers[0].load_state_dict(state)
    assert {one.dtype for one in moments(second)} == {torch.bfloat16}
    assert all(torch.equal(*pair) for pair in zip(moments(first), moments(second), strict=True))


def weights(run: Path) -> dict[str, torch.Tensor]:
    model = gpt()
    load_weights(model, committed(run / CHECKPOINTS)[-1])
    return dict(model.named_parameters())


def test_a_checkpoint_is_counted_as_it_is() -> None:
    exact, half = (job(state).plan for state in ("fp32", "bf16"))
    assert (exact.state_bytes, half.state_bytes) == (STATE_BYTES, 8)
    before, after = (change_s(plan, MEASURED, 1, 1) - MEASURED.resize_s for plan in (exact, half))
    assert after == pytest.approx(before * 8 / 12)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("beta2", {"train__beta2": 0.999}),
        ("beta1", {"train__beta1": 0.99}),
        ("momentum", {"train__momentum": 0.99, "train__optimizer": "sgd"}),
        ("beta2", {"train__beta2": 0.99, "train__optimizer": "muon"}),
    ],
)
def test_averages_too_long_for_eight_bits_are_refused(key: str, changes: dict[str, object]) -> None:
    with pytest.raises(
        UserError, match=rf"^train\.{key}: with optimizer_state 'bf16', .* want at most 0\.98, got 0\.99"
    ):
        experiment(train__optimizer_state="bf16", **changes)
    experiment(train__optimizer_state="fp32", **changes)


def test_what_nothing_is_averaged_by_may_be_anything() -> None:
    experiment(train__optimizer_state="bf16", train__optimizer="sgd", train__beta2=0.999)


def test_an_average_as_long_as_may_be_follows_to_a_fifth() -> None:
    """The bound of the betas: bf16's half unit over what a step changes, 2**-8 / (1 - 0.98), is 20%."""
    for beta, most in ((0.95, 0.08), (0.98, 0.2)):
        for start in (1.0, 1.99, 100.0):
            value = torch.tensor(start, dtype=torch.bfloat16)
            for target in (start * 3, start / 3):
                for _ in range(1000):
                    value = (value.double() * beta + target * (1 - beta)).bfloat16()
                assert abs(value.item() / target - 1) < most
    assert (torch.tensor(1.0) * 0.999).bfloat16() == 1.0


def test_deepspeed_keeps_its_own_state() -> None:
    with pytest.raises(
        UserError, match=r"^train\.optimizer_state: strategy 'deepspeed' keeps it in fp32; want strategy"
    ):
        experiment(train__optimizer_state="bf16", train__strategy="deepspeed", train__precision="fp32")


def test_it_decides_what_is_trained_and_is_said_with_the_optimizer() -> None:
    assert settings(job("bf16"))["train.optimizer_state"] == "bf16"
    assert job("bf16").train.groups.endswith("; state in bf16")
    assert "bf16" not in job("fp32").train.groups
