"""`tokendrop bench step`: step time by kept length beside the FLOPs, and a plain model beside our baseline."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tokendrop.bench.figures import bench_result, figure, interleave, ratios
from tokendrop.bench.reference import Plain, plain_model
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build
from tokendrop.config.model import PRESETS
from tokendrop.method import Dropping, TokenScores
from tokendrop.models.batch import Batch
from tokendrop.schedule.costs import ModelShape
from tokendrop.train.device import autocast, pick_device, pick_dtype, tune_cpu
from tokendrop.train.engines.base import Engine
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.worker import build_engine

_CPU_MODEL = {"layers": 8, "width": 256, "heads": 4, "sequence_length": 512, "vocab_size": 4096}
_GPU_PRESET = "gpt3-350m"
_MODELS = {  # of each kind, its task and what its presets leave open; vocabularies are multiples of 64
    "gpt": ("causal_lm", {"vocab_size": 50304}),
    "bert": ("masked_lm", {"vocab_size": 30592}),
    "vit": ("image_classification", {"classes": 1000}),
}
_MICRO_BATCHES = {"gpt": 8, "bert": 8, "vit": 32}  # of images as in jobs/paper
_SHARES = (16, 8, 4, 2, 1)


def bench_step(
    *,
    preset: str | None,
    micro_batch: int | None,
    precision: str,
    compiled: bool,
    rounds: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Time whole training steps (draw, forward, backward, clip, AdamW) at kept lengths from 1/16 to full."""
    device = pick_device()
    tune_cpu()
    dtype = pick_dtype(precision, device)
    micro_batch = micro_batch or _MICRO_BATCHES[PRESETS[preset or _GPU_PRESET]]
    job = _job(preset, micro_batch, precision, compiled, device)
    config, batch = job.model, job.task.build(job).random_batch(micro_batch, device)

    engine, dropping = build_engine(job, device)
    lengths = {f"1/{share}": config.sequence_length // share for share in _SHARES}
    step = partial(timed_step, engine, dropping, batch, sequence_length=config.sequence_length)
    cases = {name: partial(step, kept_length=kept) for name, kept in lengths.items()}
    plain = plain_model(config, engine.model)
    if plain is not None:
        (optimizer,) = build_optimizers(plain.model.to(device), job.train)
        cases[plain.name] = partial(timed, partial(plain_step, plain, optimizer, batch, dtype), batch)
    else:
        log(_peer_is_missing(config.kind))
    for warm_up in cases.values():
        warm_up()
        warm_up()
    seconds = interleave(cases, rounds=rounds, log=log)

    figures = _figures(seconds, job.plan.shape, lengths)
    figures["tokens_per_s_full"] = figure(
        [micro_batch * config.sequence_length / s for s in seconds["1/1"]], "tokens/s"
    )
    precision_name = "bf16" if dtype == torch.bfloat16 else "fp32"
    command = f"tokendrop bench step --micro-batch {micro_batch} --precision {precision_name} --rounds {rounds}"
    command += f" --preset {preset}" if preset else ""
    return bench_result("step", figures, command + (" --compile" if compiled else ""))


def _peer_is_missing(kind: str) -> str:
    library, extra = ("timm", "vision") if kind == "vit" else ("transformers", "eval")
    return f"peer     {library} is not installed, and left out; pip install 'tokendrop[{extra}]'"


def _figures(seconds: Mapping[str, list[float]], shape: ModelShape, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Step times and their ratios to the full length, beside those of the FLOPs.

    Args:
        shape: as the plan counts it: a head that reads some tokens of each sequence counts for those alone.
    """
    full, dropped = seconds["1/1"], shape.layers - 2
    flops = {name: shape.flops(kept=kept, dropped_layers=dropped) for name, kept in lengths.items()}
    figures: dict[str, Any] = {}
    for name in lengths:
        figures[f"step_ms_at_{name}"] = figure([s * 1e3 for s in seconds[name]], "ms")
        figures[f"time_ratio_at_{name}"] = figure(ratios(seconds[name], full), "x full")
        figures[f"flops_ratio_at_{name}"] = figure([flops[name] / flops["1/1"]], "x full")
    quarter = flops["1/4"] / flops["1/1"]
    figures["time_over_flops_at_quarter"] = figure([r / quarter for r in ratios(seconds["1/4"], full)], "x")
    for name in seconds.keys() - lengths.keys():
        figures[f"{name}_over_ours"] = figure(ratios(seconds[name], full), "x time")
    return figures


def timed_step(
    engine: Engine,
    dropping: Dropping | None,
    batch: Batch,
    *,
    kept_length: int | Mapping[int, int],
    sequence_length: int,
    micro_batches: int = 1,
    update: bool = True,
    scores: TokenScores | None = None,
    runs: int = 1,
) -> float:
    """Seconds of draw, forward and backward, so often, and of clip and AdamW where `update` is set.

    Args:
        kept_length: as of `Dropping.draw`; where nothing draws, sequences are cut to it.
        scores: by which the job's method chooses.
        runs: steps in a row, of which it is the mean.
    """
    if dropping is None:
        assert isinstance(kept_length, int)
        batch = batch.cut(kept_length)
    size, global_batch = len(batch.sample_ids_B), micro_batches * len(batch.sample_ids_B)
    where: Any = {"sequence_length": sequence_length, "device": batch.device, "global_batch": global_batch}

    def step() -> None:
        for left in reversed(range(micro_batches)):
            if dropping is not None:
                places = range(left * size, (left + 1) * size)
                where["scores"] = None if scores is None else scores.of(batch.inputs()["input_ids_BS"])
                dropping.draw(kept_length=kept_length, step=0, sample_ids=batch.sample_ids_B, places=places, **where)
            engine.forward_backward(batch, share=1 / micro_batches, last_micro_batch=left == 0)
        if update:
            engine.step(lr=1e-4, max_grad_norm=1.0)

    return timed(step, batch, runs=runs)


def plain_step(plain: Plain, optimizer: torch.optim.Optimizer, batch: Batch, dtype: torch.dtype) -> None:
    """One step of a plain model, as its users write it."""
    with autocast(batch.device, dtype):
        loss = plain.loss(plain.model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def timed(run: Callable[[], object], batch: Batch, *, runs: int = 1) -> float:
    """Seconds of one run, the mean of so many in a row, between which nobody waits for the batch's device."""
    synchronize(batch)
    started = time.perf_counter()
    for _ in range(runs):
        run()
    synchronize(batch)
    return (time.perf_counter() - started) / runs


def _job(
    preset: str | None, micro_batch: int, precision: str, compiled: bool, device: torch.device
) -> ExperimentConfig:
    is_small = preset is None and device.type == "cpu"
    kind = PRESETS[preset or _GPU_PRESET]
    task, rest = _MODELS[kind]
    model = _CPU_MODEL if is_small else {"preset": preset or _GPU_PRESET, **rest}
    batch = {"global_batch": micro_batch, "micro_batch": micro_batch}
    tree = {
        "name": "bench-step",
        "task": {"kind": task},
        "model": {"kind": kind, **model},
        "data": {"corpus": ["random"]},
        "train": {"length": "1 steps", **batch, "peak_lr": 1e-4, "precision": precision, "compile": compiled},
        "drop": {"method": "random_ltd"},
    }
    return build(ExperimentConfig, tree, "")


def synchronize(batch: Batch) -> None:
    """Return when the batch's device has done what it was given."""
    if batch.device.type == "cuda":
        torch.cuda.synchronize()
