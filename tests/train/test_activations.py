"""What `tokens_per_micro_batch: auto` goes by, against what autograd keeps of a forward pass."""

import pytest
import torch
from torch import Tensor, nn

from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models.batch import Batch
from tokendrop.train.dropping import draw
from tokendrop.train.worker import build_engine

LAYERS, SEQUENCES = 8, 4
SIZES = {"layers": LAYERS, "width": 32, "heads": 2}
TEXT = {**SIZES, "sequence_length": 64, "vocab_size": 64}
VIT = {**SIZES, "kind": "vit", "image_size": 32, "patch_size": 4, "classes": 10}
MODELS = {
    "gpt": {"model": {"kind": "gpt", **TEXT}},
    "bert": {"model": {"kind": "bert", **TEXT, "norm": "pre"}, "task": {"kind": "masked_lm"}},
    "vit": {"model": VIT, "task": {"kind": "image_classification"}},
}


def job(name: str, *, kept: int, recomputes: bool) -> ExperimentConfig:
    """A job whose micro batches may grow to `SEQUENCES` sequences."""
    return experiment(
        **MODELS[name],
        drop={"method": "constant", "kept": kept},
        train__global_batch=SEQUENCES,
        train__micro_batch=1,
        train__lr_clock="step",
        train__tokens_per_micro_batch="auto",
        train__activation_checkpointing=recomputes,
    )


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_that_grow_keep_no_more_than_one_at_full_length(name: str, recomputes: bool) -> None:
    length = job(name, kept=4, recomputes=recomputes).model.shape.sequence_length
    full = kept_bytes(job(name, kept=length, recomputes=recomputes), sequences=1)
    for kept in (length // 16, length // 4, length // 2):
        config = job(name, kept=kept, recomputes=recomputes)
        most = config.plan.at(0).most_sequences
        assert kept_bytes(config, sequences=most) <= 1.1 * full
        assert kept_bytes(config, sequences=most + 1) > 0.9 * full


def kept_bytes(config: ExperimentConfig, *, sequences: int) -> int:
    """Memory of all tensors that a forward pass saves for the backward pass, weights left out."""
    engine, dropping = build_engine(config, torch.device("cpu"))
    assert dropping is not None
    batch: Batch = config.task.build(config).random_batch(sequences, torch.device("cpu"))
    draw(config, config.plan, dropping, batch, step=0, kept=config.plan.at(0).kept_by_route)
    weights = {one.untyped_storage().data_ptr() for one in engine.model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not isinstance(tensor, nn.Parameter):
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    engine.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine.forward(engine.model, batch)  # held, so that no memory is used twice
    assert loss.mean.requires_grad
    return sum(found.values())
