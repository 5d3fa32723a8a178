"""What micro batches grow by and layers are computed again by, against what autograd keeps of a forward pass."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models import attention
from tokendrop.models.batch import Batch
from tokendrop.models.layer import recompute_layers
from tokendrop.schedule.kept_length import Constant
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


@pytest.mark.parametrize(("name", "precision"), [("gpt", "fp64"), ("gpt", "bf16"), ("bert", "bf16"), ("vit", "fp32")])
def test_segments_keep_what_their_plan_counts(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not layers are computed again: then what one of them keeps is there at that time, beside the rest."""
    monkeypatch.setattr(attention, "_SCORES_AT_ONCE", 0)  # attention as on a GPU, where it keeps no scores in bf16 too
    counted = [segment.activation_bytes for segment in limited(name, precision, "1 TB").plan.segments]
    limit = (counted[1] + counted[2]) / 2e6  # type: ignore[operator]
    config = limited(name, precision, f"{limit:.3f} MB")
    assert [segment.recomputes for segment in config.plan.segments] == [False, False, True, True]
    layer = layer_bytes(name, precision)
    for segment in config.plan.segments:
        kept = kept_bytes(config, sequences=SEQUENCES, step=segment.start, dtype=DTYPES[precision])
        kept += layer if segment.recomputes else 0
        assert segment.activation_bytes is not None
        assert kept == pytest.approx(segment.activation_bytes, rel=0.1)
        assert kept <= segment.activation_bytes
        assert kept <= 1e6 * limit


DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
STAGES = {
    "kind": "piecewise",
    "stages": [{"at": f"{at} steps", "kept": kept} for at, kept in enumerate([4, 16, 32, 48])],
}


def limited(name: str, precision: str, limit: str, *, layers: int = 12) -> ExperimentConfig:
    """A job whose kept length grows."""
    model = {"model": MODELS[name]["model"] | {"width": 64, "layers": layers}}
    return experiment(
        **MODELS[name] | model,
        drop={"method": "random_ltd", "schedule": STAGES},
        train__length="4 steps",
        train__global_batch=SEQUENCES,
        train__micro_batch=SEQUENCES,
        train__precision=precision,
        train__lr_clock="step",
        train__warmup="0 steps",
        train__activation_checkpointing=limit,
    )


def layer_bytes(name: str, precision: str) -> int:
    """What one layer keeps at full length."""
    kept = []
    for layers in (3, 4):
        config = limited(name, precision, "1 TB", layers=layers)
        config = replace(config, drop=replace(config.drop, schedule=Constant(kept=config.model.shape.sequence_length)))
        kept.append(kept_bytes(config, sequences=SEQUENCES, dtype=DTYPES[precision]))
    return kept[1] - kept[0]


def kept_bytes(config: ExperimentConfig, *, sequences: int, step: int = 0, dtype: torch.dtype = torch.float64) -> int:
    """Memory of all tensors that a step's forward pass saves for the backward pass, weights left out.

    Args:
        dtype: of matrix products, whether or not this machine has instructions for it.
    """
    weights_in = "fp64" if dtype == torch.float64 else "fp32"
    built = replace(config, train=replace(config.train, precision=weights_in))
    engine, dropping = build_engine(built, torch.device("cpu"))
    engine.dtype = dtype
    recompute_layers(engine.model, again=config.plan.at(step).recomputes)
    assert dropping is not None
    batch: Batch = config.task.build(config).random_batch(sequences, torch.device("cpu"))
    draw(config, config.plan, dropping, batch, step=step, kept=config.plan.at(step).kept_by_route)
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
