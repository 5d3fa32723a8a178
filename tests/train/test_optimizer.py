"""Optimizers by a key: whose parameters they are, what a step does, and what a checkpoint holds of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from groups import together, train_until
from images import MODEL
from tiny import assert_same, experiment, gpt, loss_of, rows_of
from tokendrop.config.load import build
from tokendrop.config.model import BertConfig, VitConfig
from tokendrop.errors import UserError
from tokendrop.models.build import build_bert, build_vit
from tokendrop.track.journal import read_steps
from tokendrop.train.engines.ddp import DdpEngine
from tokendrop.train.optimizer import build_optimizers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BERT = BertConfig(layers=3, width=16, heads=2, sequence_length=16, vocab_size=50)

# by what losses of different world sizes differ, relatively: Muon orthogonalizes in bf16
TOLERANCES = {"sgd": 1e-10, "muon": 2e-2, "sgd, fsdp": 1e-10, "sgd, ddp, no momentum": 1e-10}


_TWO_PRODUCTS = {"mlp.up.weight", "mlp.down.weight"}
MODELS = {
    "gpt": (gpt, {"attention.qkv.weight", "attention.out.weight", *_TWO_PRODUCTS}),
    "bert": (
        lambda: build_bert(BERT, sentence_head=True, most_labels=2, seed=1),
        {"attention.qkv.weight", "attention.out.weight", *_TWO_PRODUCTS},
    ),
    "vit": (
        lambda: build_vit(build(VitConfig, MODEL, "model"), seed=1),
        {"attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"},
    ),
}
"""Each family, and its layers' matrices."""


@pytest.mark.parametrize("family", MODELS)
def test_muon_has_the_layers_matrices_and_adamw_the_rest(family: str) -> None:
    build_one, kinds = MODELS[family]
    model = build_one()
    muon, adamw = build_optimizers(model, experiment(train__optimizer="muon").train)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, *rest = [{names[id(p)] for p in group["params"]} for one in (muon, adamw) for group in one.param_groups]
    assert {name.split(".", 2)[2] for name in matrices} == kinds
    assert len(matrices) == 4 * model.config.layers
    assert set().union(*rest) == set(names.values()) - matrices
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("kind", ["sgd", "muon"])
def test_a_step_is_that_of_torchs_own_optimizers_on_clipped_gradients(kind: str) -> None:
    config = experiment(train__optimizer=kind, train__momentum=0.8, train__weight_decay=0.3).train
    ours, theirs = gpt(), gpt()
    engine = DdpEngine(ours, build_optimizers(ours, config), torch.float64, loss=loss_of)
    matrices = [p for p in theirs.blocks.parameters() if p.ndim == 2]
    others = [p for p in theirs.parameters() if p.ndim == 2 and all(p is not one for one in matrices)]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": others, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    if kind == "sgd":
        groups[0]["params"] = [*matrices, *others]
        optimizers = [torch.optim.SGD(groups, lr=0.02, momentum=0.8)]
    else:
        how = {"momentum": 0.8, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon(matrices, lr=0.02, **how)
        optimizers = [muon, torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))]
    for step in range(3):
        batch = rows_of(range(8 * step, 8 * step + 8))
        engine.forward_backward(batch, share=1.0, last_micro_batch=True)
        engine.step(lr=0.02, max_grad_norm=0.5)
        loss_of(theirs, batch).mean.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for one in optimizers:
            one.step()
            one.zero_grad()
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()), tolerance=1e-12)


def leg(folder: Path, stop: int) -> None:
    """What each worker of a group does."""
    for name in TOLERANCES:
        kind, strategy, *more = [*name.split(", "), "ddp"]
        momentum = 0.0 if "no momentum" in more else 0.9
        how = {"train__optimizer": kind, "train__strategy": strategy, "train__momentum": momentum}
        config = experiment(**how, train__micro_batch=2)
        train_until(config, folder / name, stop)


@pytest.mark.parametrize("kind", TOLERANCES)
def test_a_run_that_goes_on_at_other_sizes_is_an_uninterrupted_one(legs: tuple[Path, Path, Path], kind: str) -> None:
    whole, again, resized = ([row["loss"] for row in read_steps(folder / kind)] for folder in legs)
    assert again == pytest.approx(whole, rel=1e-12)  # killed and gone on with, by one worker
    np.testing.assert_allclose(resized, whole, rtol=TOLERANCES[kind])


@pytest.fixture(scope="module")
def legs(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Six steps by one worker; by one that begins anew at step 4; by 1, 2 and 4."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(3)]
    for folder, sizes in zip(folders, [[(1, 6)], [(1, 4), (1, 6)], [(1, 2), (2, 4), (4, 6)]], strict=True):
        for workers, stop in sizes:
            together(workers, leg, folder, stop)
    return folders[0], folders[1], folders[2]


@pytest.mark.parametrize(("kind", "strategy"), [("muon", "fsdp"), ("muon", "deepspeed"), ("sgd", "deepspeed")])
def test_a_strategy_that_can_not_is_refused_in_a_sentence(kind: str, strategy: str) -> None:
    with pytest.raises(UserError, match=rf"^train\.optimizer: '{kind}' works with strategy .*, not '{strategy}'"):
        experiment(train__optimizer=kind, train__strategy=strategy, train__precision="fp32")


@pytest.mark.parametrize("momentum", [-0.1, 1])
def test_a_momentum_that_is_none_is_refused(momentum: float) -> None:
    with pytest.raises(UserError, match="want 0 <= momentum < 1"):
        experiment(train__optimizer="sgd", train__momentum=momentum)
