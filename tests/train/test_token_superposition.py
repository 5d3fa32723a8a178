"""Token superposition: bags are read and predicted as written out by hand, and then everything is as without it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attempts import lone_worker
from groups import together, train_until
from tiny import TOKENS, assert_same, experiment, gpt, gradients, token_rows
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models.batch import TextBatch
from tokendrop.models.gpt import rotary_angles
from tokendrop.track.journal import read_steps
from tokendrop.train.loop import accumulate, validate

EXACT = 1e-12
STEPS, END, BAG = 6, 3, 4
KEY = ("loss", "grad_norm", "val_loss", "layer_tokens", "kept_length", "lr")
CPU = torch.device("cpu")
DROP = {"method": "token_superposition", "bag": BAG, "until": f"{END} steps"}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def job(strategy: str = "ddp", **changes: Any) -> ExperimentConfig:
    return experiment(**{"train__strategy": strategy, "train__micro_batch": 2, "drop": {**DROP}, **changes})


def step_of(config: ExperimentConfig, step: int) -> tuple[torch.Tensor, dict[str, Any], list[tuple[int, ...]], float]:
    """The loss and gradients of a step, the shapes that the model reads in it, and the validation loss before it."""
    parts = lone_worker(config)
    engine = parts.engine
    assert parts.dropping is None
    shapes: list[tuple[int, ...]] = []
    engine.model.register_forward_pre_hook(lambda _, rows: shapes.extend(tuple(one.shape) for one in rows))
    validation = validate(parts)[0]
    shapes.clear()
    loss, _, _ = accumulate(config, config.plan, parts, step)
    return loss, {name: one.grad for name, one in engine.model.named_parameters()}, shapes, validation


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_mean_of_a_bag_is_read_and_each_token_of_the_next_one_counts_alike(size: int, positions: str) -> None:
    ids_BS, labels_BS = token_rows(vocab_size=5)  # so that bags have a token twice
    batch = TextBatch(input_ids_BS=ids_BS, labels_BS=labels_BS, sample_ids_B=torch.arange(3)).in_bags(size)
    model, plain = gpt(positions=positions), gpt(positions=positions)
    loss, losses_BN = model(batch.input_ids_BS, batch.labels_BS, token_losses=True)

    bags = TOKENS // size - 1
    hot_BSV = F.one_hot(ids_BS, 50).double()
    bags_BNV = torch.stack([hot_BSV[:, size * n : size * (n + 1)].mean(1) for n in range(bags + 1)], dim=1)
    x_BND, rotary = bags_BNV[:, :-1] @ plain.tokens.weight, None
    if plain.positions is None:
        rotary = rotary_angles(bags, 8, x_BND)
    else:
        x_BND = x_BND + plain.positions.weight[:bags]
    for block in plain.blocks:
        x_BND = block(x_BND, rotary)
    logits_BNV = plain.norm(x_BND) @ plain.tokens.weight.T
    expected_BN = -(bags_BNV[:, 1:] * logits_BNV.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(losses_BN, expected_BN.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(loss, expected_BN.mean(), rtol=EXACT, atol=EXACT)
    assert_same(gradients(model, loss), gradients(plain, expected_BN.mean()), tolerance=EXACT)


def test_steps_are_in_bags_until_they_are_the_plain_models_bit_for_bit() -> None:
    plain = job(drop={"method": "none"})
    for step in (0, END - 1):
        _, _, shapes, validation = step_of(job(), step)
        assert shapes == [(2, TOKENS // BAG - 1, BAG)] * 8
        assert validation == step_of(plain, step)[3]
    ours, theirs = step_of(job(), END), step_of(plain, END)
    assert torch.equal(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
    assert ours[2] == [(2, TOKENS)] * 8
    at_once, theirs = step_of(job(drop=DROP | {"until": "0 steps"}), 0), step_of(plain, 0)
    assert torch.equal(at_once[0], theirs[0])


def test_the_plan_counts_bags() -> None:
    plan, bags = job().plan, TOKENS // BAG - 1
    assert [plan.at(step).kept_length for step in range(STEPS)] == [bags] * END + [TOKENS] * (STEPS - END)
    assert plan.layer_tokens(STEPS) == 8 * 4 * END * (bags + TOKENS)
    short = job(model__sequence_length=bags, drop={"method": "none"}).plan
    assert plan.flops(END) == short.flops(END)
    assert plan.flops(STEPS) - plan.flops(END) == END * plan.flops_full // STEPS
    assert job(drop={"method": "token_superposition", "bag": 2}).plan.at(1).kept_length == 7
    assert job(drop={"method": "token_superposition", "bag": 2}).plan.at(2).kept_length == TOKENS


def runs_of(workers: int, folder: Path, stop: int = STEPS) -> None:
    """What each worker of a group does."""
    for strategy in ("ddp", "fsdp") if workers > 1 else ("ddp",):
        train_until(job(strategy), folder / f"{strategy} {workers}", stop)


def test_losses_are_those_of_one_worker_and_a_stopped_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    for workers in (1, 2, 4):
        together(workers, runs_of, workers, tmp_path)
    (tmp_path / "again").mkdir()
    for stop in (3, STEPS):  # the third step was not saved, and is done again
        together(1, runs_of, 1, tmp_path / "again", stop)
    expected = column(tmp_path / "ddp 1")
    assert column(tmp_path / "again" / "ddp 1") == expected
    for name in ("ddp 2", "fsdp 2", "ddp 4", "fsdp 4"):
        for key, values in column(tmp_path / name).items():
            np.testing.assert_allclose(values, expected[key], rtol=1e-10, err_msg=f"{name}: {key}")


def column(run: Path) -> dict[str, list[float]]:
    return {key: [row[key] for row in read_steps(run) if row[key] is not None] for key in KEY}


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ({"bag": 1}, "bag: want at least 2 tokens, got 1"),
        ({"bag": 3}, "drop.bag: want a divisor of model.sequence_length=16 below it, got 3"),
        ({"bag": TOKENS}, "drop.bag: want a divisor of model.sequence_length=16 below it, got 16"),
        ({"schedule": {"kind": "constant", "kept": 3}}, "leave out schedule and by_layer"),
    ],
)
def test_a_mistake_is_named(drop: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        job(drop=DROP | drop)


@pytest.mark.parametrize("name", ["bert_tiny", "vit_tiny"])
def test_models_that_are_not_causal_are_refused(name: str, complaint) -> None:
    path = Path(__file__).parents[2] / "jobs" / "pretrain" / f"{name}.yaml"
    said = complaint("plan", path, "drop={method: token_superposition, bag: 2}")
    assert "drop.method: 'token_superposition' wants a causal model, of kind gpt, not" in said
